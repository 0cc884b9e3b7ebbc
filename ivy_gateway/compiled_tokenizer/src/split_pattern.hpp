// The regular expressions by which byte-level vocabularies split a text into words, matched by hand.
//
//     GPT-2   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//     cl100k  (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*
//             |\s*[\r\n]+|\s+(?!\S)|\s+
//
// Each matches at every place of a text, so words follow each other without a gap.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "paged_table.hpp"

namespace ivy {

using CodePointRanges = std::vector<std::pair<char32_t, char32_t>>;  // first and last of each

struct SplitPatternOptions {
    CodePointRanges letters, numbers, white_space;
    bool cl100k = false;         // else GPT-2
    std::size_t max_digits = 1;  // in one word; cl100k alone
};

class SplitPattern {
public:
    explicit SplitPattern(const SplitPatternOptions& options);

    // Where the word that begins at `start` ends; `start` is below `size`.
    template <class Unit>
    std::size_t end_of_word(const Unit* text, std::size_t size, std::size_t start) const {
        return cl100k_ ? cl100k(text, size, start) : gpt2(text, size, start);
    }

    // The same under GPT-2's pattern at the start of `text`, if a space were before it; `text` begins with none.
    template <class Unit>
    std::size_t end_after_space(const Unit* text, std::size_t size) const {
        if (!is_space(kind(text[0]))) return end_of_run(text, size, 0, kind(text[0]));
        const std::size_t end = end_of_space(text, size, 0);
        return end == size ? end : end - 1;
    }

private:
    enum class Kind : std::uint8_t { Other, Letter, Number, Space, Newline };

    Kind kind(char32_t c) const { return kinds_[c]; }
    static bool is_space(Kind kind) { return kind >= Kind::Space; }
    static std::vector<Kind> kinds(const SplitPatternOptions& options);

    template <class Unit>
    std::size_t gpt2(const Unit* text, std::size_t size, std::size_t i) const {
        const std::size_t suffix = text[i] == '\'' ? contraction(text + i + 1, size - i - 1, false) : 0;
        if (suffix != 0) return i + 1 + suffix;
        const std::size_t run = i + (text[i] == ' ' && i + 1 < size && !is_space(kind(text[i + 1])));
        const Kind of_run = kind(text[run]);
        return is_space(of_run) ? end_of_blank(text, size, i) : end_of_run(text, size, run, of_run);
    }

    template <class Unit>
    std::size_t cl100k(const Unit* text, std::size_t size, std::size_t i) const {
        const std::size_t suffix = text[i] == '\'' ? contraction(text + i + 1, size - i - 1, true) : 0;
        if (suffix != 0) return i + 1 + suffix;
        const Kind first = kind(text[i]);
        const Kind second = i + 1 < size ? kind(text[i + 1]) : Kind::Newline;
        if (first == Kind::Letter) return end_of_run(text, size, i + 1, Kind::Letter);
        if (first == Kind::Number) return end_of_run(text, std::min(size, i + max_digits_), i + 1, Kind::Number);
        if (first != Kind::Newline && second == Kind::Letter) return end_of_run(text, size, i + 1, Kind::Letter);
        if (first != Kind::Other && !(text[i] == ' ' && second == Kind::Other)) return end_of_lines(text, size, i);
        const std::size_t end = end_of_run(text, size, i + 1, Kind::Other);
        return end_of_run(text, size, end, Kind::Newline);
    }

    template <class Unit>
    std::size_t end_of_run(const Unit* text, std::size_t size, std::size_t i, Kind of_run) const {
        while (i < size && kind(text[i]) == of_run) ++i;
        return i;
    }

    template <class Unit>
    std::size_t end_of_space(const Unit* text, std::size_t size, std::size_t i) const {
        while (i < size && is_space(kind(text[i]))) ++i;
        return i;
    }

    // \s+(?!\S)|\s+: white space without its last character, which may belong to the next word.
    template <class Unit>
    std::size_t end_of_blank(const Unit* text, std::size_t size, std::size_t start) const {
        const std::size_t end = end_of_space(text, size, start);
        return end == size || end == start + 1 ? end : end - 1;
    }

    // \s*[\r\n]+|\s+(?!\S)|\s+: up to the last end of a line, if there is any.
    template <class Unit>
    std::size_t end_of_lines(const Unit* text, std::size_t size, std::size_t start) const {
        std::size_t end = start, after_line = start;
        for (; end < size && is_space(kind(text[end])); ++end)
            if (kind(text[end]) == Kind::Newline) after_line = end + 1;
        if (after_line != start) return after_line;
        return end == size || end == start + 1 ? end : end - 1;
    }

    // How long what follows an apostrophe is if it is s, t, re, ve, m, ll or d; else 0.
    template <class Unit>
    static std::size_t contraction(const Unit* text, std::size_t size, bool any_case) {
        const char32_t first = size > 0 ? folded(text[0], any_case) : 0;
        const char32_t second = size > 1 ? folded(text[1], any_case) : 0;
        switch (first) {
            case 's':
            case 't':
            case 'm':
            case 'd': return 1;
            case 'r':
            case 'v': return second == 'e' ? 2 : 0;
            case 'l': return second == 'l' ? 2 : 0;
            default: return 0;
        }
    }

    // The letter that `c` is without regard to case: also LATIN SMALL LETTER LONG S.
    static char32_t folded(char32_t c, bool any_case) {
        if (!any_case) return c;
        return c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c == 0x17F ? U's' : c;
    }

    bool cl100k_;
    std::size_t max_digits_;
    PagedTable<Kind> kinds_;
};

}  // namespace ivy
