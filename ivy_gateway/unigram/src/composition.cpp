#include "composition.hpp"

namespace ivy {
namespace {

constexpr char32_t kNumCodePoints = 0x110000;

}  // namespace

Composition::Composition(const CompositionOptions& options)
    : table_([all = properties(options)](char32_t c) { return all[c]; }) {
    for (const auto& [first, second] : options.pairs) pairs_.insert(pair(first, second));
    for (first_ = 0; first_ < kNumCodePoints && !table_[first_].matters();) ++first_;
}

std::vector<Composition::Properties> Composition::properties(const CompositionOptions& options) {
    std::vector<Properties> all(kNumCodePoints);
    const auto add = [&](char32_t c, unsigned bit) { all.at(c).bits |= static_cast<std::uint16_t>(bit); };
    for (const auto& [first, last] : options.changing)
        for (char32_t c = first; c <= last; ++c) add(c, kChanges);
    for (const auto& [first, last] : options.composed)
        for (char32_t c = first; c <= last; ++c) add(c, kComposed);
    for (const auto& [c, rank] : options.marks) add(c, rank);
    for (const auto& [first, second] : options.pairs) add(second, kJoins);
    return all;
}

// A composed starter may come apart, for a mark that belongs before one of its own.
bool Composition::joins(char32_t starter, char32_t c) const {
    return table_[starter].is(kComposed) || pairs_.count(pair(starter, c)) != 0;
}

}  // namespace ivy
