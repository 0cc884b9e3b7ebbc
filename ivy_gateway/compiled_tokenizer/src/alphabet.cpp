#include "alphabet.hpp"

#include <algorithm>
#include <stdexcept>

namespace ivy {
namespace {

constexpr std::size_t kMaxCharacters = 65'000;

}  // namespace

Alphabet::Alphabet(const std::vector<std::u32string>& pieces) {
    std::unordered_map<char32_t, std::uint32_t> counts;
    for (const std::u32string& piece : pieces)
        for (const char32_t c : piece) ++counts[c];
    counts.erase(kMetaSymbol);
    if (counts.size() > kMaxCharacters) throw std::length_error("alphabet: too many different characters");
    std::vector<std::pair<char32_t, std::uint32_t>> ordered(counts.begin(), counts.end());
    std::sort(ordered.begin(), ordered.end(), [](const auto& a, const auto& b) {
        return a.second != b.second ? a.second > b.second : a.first < b.first;
    });
    codes_.emplace(kMetaSymbol, kMeta);
    for (const auto& [c, count] : ordered) codes_.emplace(c, static_cast<Code>(codes_.size() + 1));
}

Code Alphabet::code(char32_t c) const {
    const auto found = codes_.find(c);
    return found == codes_.end() ? kUnknown : found->second;
}

CodeString Alphabet::encode(std::u32string_view text) const {
    CodeString codes;
    for (const char32_t c : text) codes.push_back(code(c));
    return codes;
}

std::uint16_t Replacements::add(const std::vector<Entry>& entries) {
    if (starts_.size() > kMaxCharacters) throw std::length_error("normalizer: too many different replacements");
    entries_.insert(entries_.end(), entries.begin(), entries.end());
    starts_.push_back(static_cast<std::uint32_t>(entries_.size()));
    return static_cast<std::uint16_t>(starts_.size() - 2);
}

}  // namespace ivy
