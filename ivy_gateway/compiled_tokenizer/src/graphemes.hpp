// Extended grapheme clusters (Unicode Standard Annex 29), as far as they can be shorter than six bytes of UTF-8.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace ivy {

// Grapheme_Cluster_Break. `Pictographic` is Extended_Pictographic; regional indicators are Other, because no
// cluster of one and something else is short.
enum class Break : std::uint8_t {
    Other, CR, LF, Control, Extend, ZWJ, SpacingMark, Prepend, L, V, T, LV, LVT, Pictographic
};
enum class Conjunct : std::uint8_t { None, Consonant, Linker, Extend };  // Indic_Conjunct_Break

struct GraphemeRange {
    char32_t first, last;
    Break kind;
    Conjunct conjunct;
};

// Every code point whose property is neither Other nor that of a Hangul syllable, in order.
const std::vector<GraphemeRange>& grapheme_ranges();
const char* name_of(Break kind);
const char* name_of(Conjunct conjunct);

// The properties of each code point of [0, 0x110000).
std::vector<std::pair<Break, Conjunct>> grapheme_properties();

constexpr bool is_joiner(Break b) { return b == Break::Extend || b == Break::ZWJ || b == Break::SpacingMark; }
constexpr bool is_control(Break b) { return b == Break::Control || b == Break::CR || b == Break::LF; }

// GB3 to GB5, GB9 to GB9b: whether two neighbours are joined, whatever stands around them.
constexpr bool joins_any(Break before, Break after) {
    if (before == Break::CR && after == Break::LF) return true;
    if (is_control(before) || is_control(after)) return false;
    return is_joiner(after) || before == Break::Prepend;
}

// GB6 to GB8.
constexpr bool joins_hangul(Break before, Break after) {
    switch (before) {
        case Break::L: return after == Break::L || after == Break::V || after == Break::LV || after == Break::LVT;
        case Break::LV:
        case Break::V: return after == Break::V || after == Break::T;
        case Break::LVT:
        case Break::T: return after == Break::T;
        default: return false;
    }
}

}  // namespace ivy
