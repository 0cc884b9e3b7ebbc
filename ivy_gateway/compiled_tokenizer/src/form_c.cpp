#include "form_c.hpp"

#include <algorithm>
#include <utility>

namespace ivy {
namespace {

constexpr char32_t kNumCodePoints = 0x110000;

// Hangul syllables and their parts: Unicode Standard, section 3.12.
constexpr char32_t kSyllables = 0xAC00, kLeading = 0x1100, kVowels = 0x1161, kTrailing = 0x11A7;
constexpr char32_t kNumLeading = 19, kNumVowels = 21, kNumTrailing = 28;
constexpr char32_t kNumSyllables = kNumLeading * kNumVowels * kNumTrailing;

// Below `base` the difference is a large number.
constexpr bool is_in(char32_t c, char32_t base, char32_t count) { return c - base < count; }

}  // namespace

FormC::FormC(const FormCOptions& options)
    : table_([all = properties(options)](char32_t c) { return all[c]; }),
      parts_(options.parts.begin(), options.parts.end()) {
    for (const auto& [first, second, joined] : options.pairs) joined_[pair(first, second)] = joined;
    while (first_ < kNumCodePoints && !table_[first_].matters()) ++first_;
}

std::vector<FormC::Properties> FormC::properties(const FormCOptions& options) {
    std::vector<Properties> all(kNumCodePoints);
    const auto set = [&](char32_t c, unsigned bits) { all.at(c).bits = static_cast<std::uint16_t>(bits); };
    for (char32_t c = kSyllables; c < kSyllables + kNumSyllables; ++c) set(c, kComposed);
    for (char32_t c = kVowels; c < kVowels + kNumVowels; ++c) set(c, kChanges);
    for (char32_t c = kTrailing + 1; c < kTrailing + kNumTrailing; ++c) set(c, kChanges);
    for (const auto& [c, parts] : options.parts) set(c, kChanges | kComposed);
    for (const auto& [first, second, joined] : options.pairs) set(joined, kComposed);
    for (const auto& [c, rank] : options.marks) set(c, all.at(c).bits | rank);
    for (const auto& [first, second, joined] : options.pairs) set(second, all.at(second).bits | kJoins);
    return all;
}

// A composed starter may come apart, for a mark that belongs before one of its own.
bool FormC::may_join(char32_t starter, char32_t c) const {
    return table_[starter].is(kComposed) || joined_.count(pair(starter, c)) != 0;
}

void FormC::take_apart(char32_t c, Vector<std::uint32_t>& out) const {
    if (!table_[c].is(kComposed)) return out.push_back(c);
    if (!is_in(c, kSyllables, kNumSyllables)) {
        const std::u32string& parts = parts_.at(c);
        out.insert(out.end(), parts.begin(), parts.end());
        return;
    }
    const char32_t index = c - kSyllables, trailing = index % kNumTrailing;
    out.push_back(kLeading + index / (kNumVowels * kNumTrailing));
    out.push_back(kVowels + index / kNumTrailing % kNumVowels);
    if (trailing != 0) out.push_back(kTrailing + trailing);
}

// Canonical order: marks in a row by their classes, those of one class as they are.
void FormC::order(NormalizedText& memory) const {
    Vector<std::uint32_t>& text = memory.text;
    const auto rank = [&](std::uint32_t c) { return table_[c].rank(); };
    for (auto next = text.begin(); next != text.end();) {
        const auto first = std::find_if(next, text.end(), [&](std::uint32_t c) { return rank(c) != 0; });
        next = std::find_if(first, text.end(), [&](std::uint32_t c) { return rank(c) == 0; });
        if (std::is_sorted(first, next, [&](auto a, auto b) { return rank(a) < rank(b); })) continue;
        memory.marks.assign(first, next);
        std::size_t places[kRank + 1] = {};
        for (const std::uint32_t mark : memory.marks) ++places[rank(mark)];
        std::size_t end = 0;
        for (std::size_t& place : places) end = std::exchange(place, end) + end;
        for (const std::uint32_t mark : memory.marks) first[static_cast<std::ptrdiff_t>(places[rank(mark)]++)] = mark;
    }
}

// Each character with the last starter, unless one between them is in the way.
void FormC::join(Vector<std::uint32_t>& text) const {
    std::size_t size = 0, starter = text.size();
    unsigned last_rank = 0;
    for (const std::uint32_t c : text) {
        const unsigned rank = table_[c].rank();
        if (starter < size && (starter + 1 == size || last_rank < rank)) {
            if (const char32_t whole = joined(text[starter], c); whole != 0) {
                text[starter] = whole;
                continue;
            }
        }
        if (rank == 0) starter = size;
        last_rank = rank;
        text[size++] = c;
    }
    text.resize(size);
}

// What the two become, or 0.
char32_t FormC::joined(char32_t first, char32_t second) const {
    if (is_in(first, kLeading, kNumLeading) && is_in(second, kVowels, kNumVowels))
        return kSyllables + ((first - kLeading) * kNumVowels + (second - kVowels)) * kNumTrailing;
    if (is_in(first, kSyllables, kNumSyllables) && (first - kSyllables) % kNumTrailing == 0 &&
        is_in(second, kTrailing + 1, kNumTrailing - 1))
        return first + (second - kTrailing);
    if (!table_[second].is(kJoins)) return 0;
    const auto found = joined_.find(pair(first, second));
    return found == joined_.end() ? 0 : found->second;
}

}  // namespace ivy
