// Whether a text is in normalization form C already: then there is nothing to normalize.
//
// Decided from what stands side by side (Unicode Standard Annex 15, "Detecting Normalization Forms"); where
// that leaves a doubt the answer is no. The properties are those of the library, whatever its Unicode version.
#pragma once

#include <cstdint>
#include <unordered_set>
#include <utility>
#include <vector>

#include "paged_table.hpp"

namespace ivy {

using CodePointRanges = std::vector<std::pair<char32_t, char32_t>>;  // first and last of each

struct CompositionOptions {
    CodePointRanges changing;                                // other characters in form C, or in doubt
    CodePointRanges composed;                                // that form D takes apart
    std::vector<std::pair<char32_t, std::uint8_t>> marks;    // and the place of their class in canonical order
    std::vector<std::pair<char32_t, char32_t>> pairs;        // that become one character, if not composed before
};

class Composition {
public:
    explicit Composition(const CompositionOptions& options);

    // Whether form C of `text` is certain to be `text`.
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
            if (c.is(kJoins) && joins(starter, text[i])) return false;
        }
        return true;
    }

private:
    static constexpr std::uint16_t kRank = 0xFF, kChanges = 0x100, kJoins = 0x200, kComposed = 0x400;

    class Properties {
    public:
        std::uint16_t bits = 0;

        bool is(std::uint16_t bit) const { return (bits & bit) != 0; }
        bool matters() const { return (bits & (kRank | kChanges | kJoins)) != 0; }
        std::uint16_t rank() const { return bits & kRank; }
    };

    static std::uint64_t pair(char32_t first, char32_t second) { return std::uint64_t{first} << 32 | second; }
    static std::vector<Properties> properties(const CompositionOptions& options);
    bool joins(char32_t starter, char32_t c) const;

    PagedTable<Properties> table_;
    std::unordered_set<std::uint64_t> pairs_;
    char32_t first_ = 0x110000;  // below it nothing matters
};

}  // namespace ivy
