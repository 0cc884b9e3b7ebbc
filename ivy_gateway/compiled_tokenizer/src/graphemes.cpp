#include "graphemes.hpp"

namespace ivy {
namespace {

constexpr char32_t kFirstSyllable = 0xAC00, kLastSyllable = 0xD7A3;
constexpr unsigned kSyllablesPerVowel = 28;  // one without and 27 with a final consonant

}  // namespace

const std::vector<GraphemeRange>& grapheme_ranges() {
    static const std::vector<GraphemeRange> ranges = {
#include "grapheme_ranges.inc"
    };
    return ranges;
}

const char* name_of(Break kind) {
    static constexpr const char* names[] = {"Other",  "CR",          "LF",      "Control", "Extend",
                                            "ZWJ",    "SpacingMark", "Prepend", "L",       "V",
                                            "T",      "LV",          "LVT",     "Pictographic"};
    return names[static_cast<unsigned>(kind)];
}

const char* name_of(Conjunct conjunct) {
    static constexpr const char* names[] = {"None", "Consonant", "Linker", "Extend"};
    return names[static_cast<unsigned>(conjunct)];
}

std::vector<std::pair<Break, Conjunct>> grapheme_properties() {
    std::vector<std::pair<Break, Conjunct>> properties(0x110000, {Break::Other, Conjunct::None});
    for (const GraphemeRange& range : grapheme_ranges())
        for (char32_t c = range.first; c <= range.last; ++c) properties[c] = {range.kind, range.conjunct};
    for (char32_t c = kFirstSyllable; c <= kLastSyllable; ++c)
        properties[c].first = (c - kFirstSyllable) % kSyllablesPerVowel == 0 ? Break::LV : Break::LVT;
    return properties;
}

}  // namespace ivy
