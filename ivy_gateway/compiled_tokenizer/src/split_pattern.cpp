#include "split_pattern.hpp"

namespace ivy {

SplitPattern::SplitPattern(const SplitPatternOptions& options)
    : cl100k_(options.cl100k),
      max_digits_(options.max_digits),
      kinds_([all = kinds(options)](char32_t c) { return all[c]; }) {}

std::vector<SplitPattern::Kind> SplitPattern::kinds(const SplitPatternOptions& options) {
    std::vector<Kind> all(0x110000, Kind::Other);
    const auto set = [&](const CodePointRanges& ranges, Kind kind) {
        for (const auto& [first, last] : ranges)
            for (char32_t c = first; c <= last; ++c) all.at(c) = kind;
    };
    set(options.letters, Kind::Letter);
    set(options.numbers, Kind::Number);
    set(options.white_space, Kind::Space);
    all['\r'] = all['\n'] = Kind::Newline;
    return all;
}

}  // namespace ivy
