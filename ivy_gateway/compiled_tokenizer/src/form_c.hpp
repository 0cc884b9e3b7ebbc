// Normalization form C (Unicode Standard Annex 15): whether a text has it, and the text in it.
//
// What characters are made of is the library's table, whatever its Unicode version; Hangul goes by arithmetic.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "memory.hpp"
#include "paged_table.hpp"

namespace ivy {

struct FormCOptions {
    struct Pair {
        char32_t first, second, joined;
    };

    std::vector<std::pair<char32_t, std::u32string>> parts;  // what form D makes of a character, if not itself
    std::vector<std::pair<char32_t, std::uint8_t>> marks;    // and the place of their class in canonical order
    std::vector<Pair> pairs;                                 // that become one character
};

// A text in form C, and memory to make it.
struct NormalizedText {
    Vector<std::uint32_t> text, marks;
};

class FormC {
public:
    explicit FormC(const FormCOptions& options);

    // Whether form C of `text` is certain to be `text`: decided from what stands side by side.
    template <class Unit>
    bool keeps(const Unit* text, std::size_t size) const {
        if (first_ > static_cast<Unit>(~Unit{0})) return true;
        char32_t starter = 0;  // the last character that is no mark
        for (std::size_t i = 0; i < size; ++i) {
            if (text[i] < first_) continue;
            const Properties c = table_[text[i]];
            if (!c.matters()) continue;
            const Properties before = i == 0 ? Properties() : table_[text[i - 1]];
            if (before.rank() == 0) starter = i == 0 ? 0 : text[i - 1];
            if (c.is(kChanges) || (c.rank() != 0 && c.rank() < before.rank())) return false;
            if (c.is(kJoins) && may_join(starter, text[i])) return false;
        }
        return true;
    }

    // Puts form C of `text` into `out`.
    template <class Unit>
    void normalize(const Unit* text, std::size_t size, NormalizedText& out) const {
        out.text.clear();
        for (std::size_t i = 0; i < size; ++i) take_apart(text[i], out.text);
        order(out);
        join(out.text);
    }

private:
    // The place of a mark's class, 0 for other characters; whether form C has the character never, or perhaps not
    // after some others; whether form D takes it apart.
    static constexpr std::uint16_t kRank = 0xFF, kChanges = 0x100, kJoins = 0x200, kComposed = 0x400;

    class Properties {
    public:
        std::uint16_t bits = 0;

        bool is(unsigned some) const { return (bits & some) != 0; }
        bool matters() const { return is(kRank | kChanges | kJoins); }
        unsigned rank() const { return bits & kRank; }
    };

    static std::vector<Properties> properties(const FormCOptions& options);
    static std::uint64_t pair(char32_t first, char32_t second) { return std::uint64_t{first} << 32 | second; }
    bool may_join(char32_t starter, char32_t c) const;
    void take_apart(char32_t c, Vector<std::uint32_t>& out) const;
    void order(NormalizedText& memory) const;
    void join(Vector<std::uint32_t>& text) const;
    char32_t joined(char32_t first, char32_t second) const;

    PagedTable<Properties> table_;
    std::unordered_map<char32_t, std::u32string> parts_;
    std::unordered_map<std::uint64_t, char32_t> joined_;
    char32_t first_ = 0;  // below it nothing matters
};

}  // namespace ivy
