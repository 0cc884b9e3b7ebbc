#include "alphabet.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <stdexcept>

namespace ivy {
namespace {

constexpr std::size_t kMaxCharacters = 65'000, kPage = 256, kNumPages = 0x110000 / kPage;

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

CharTable::CharTable(const EntryOf& entry_of) : pages_(kNumPages) {
    std::map<std::string, std::uint16_t> known;
    for (std::size_t page = 0; page < kNumPages; ++page) {
        Entry entries[kPage];
        for (std::size_t i = 0; i < kPage; ++i) entries[i] = entry_of(static_cast<char32_t>(page * kPage + i));
        std::string key(sizeof entries, '\0');
        std::memcpy(key.data(), entries, sizeof entries);
        const auto [place, is_new] = known.emplace(key, static_cast<std::uint16_t>(known.size()));
        if (is_new) entries_.insert(entries_.end(), entries, entries + kPage);
        pages_[page] = place->second;
    }
}

std::uint16_t Replacements::add(const std::vector<Entry>& entries) {
    if (starts_.size() > kMaxCharacters) throw std::length_error("normalizer: too many different replacements");
    entries_.insert(entries_.end(), entries.begin(), entries.end());
    starts_.push_back(static_cast<std::uint32_t>(entries_.size()));
    return static_cast<std::uint16_t>(starts_.size() - 2);
}

}  // namespace ivy
