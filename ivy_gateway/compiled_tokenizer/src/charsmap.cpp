#include "charsmap.hpp"

#include <cstring>
#include <stdexcept>

namespace ivy {
namespace {

// Bits of a unit: https://github.com/s-yata/darts-clone
constexpr std::uint32_t label(std::uint32_t unit) { return unit & (1U << 31 | 0xFFU); }
constexpr bool has_leaf(std::uint32_t unit) { return (unit >> 8 & 1U) != 0; }
constexpr std::uint32_t value(std::uint32_t unit) { return unit & ~(1U << 31); }
constexpr std::uint32_t offset(std::uint32_t unit) { return (unit >> 10) << ((unit & 1U << 9) >> 6); }

}  // namespace

Charsmap::Charsmap(std::string_view blob) {
    std::uint32_t trie_bytes = 0;
    if (blob.size() < sizeof trie_bytes) throw std::invalid_argument("charsmap: too short");
    std::memcpy(&trie_bytes, blob.data(), sizeof trie_bytes);
    blob.remove_prefix(sizeof trie_bytes);
    if (trie_bytes > blob.size() || trie_bytes % 4 != 0 || trie_bytes == 0)
        throw std::invalid_argument("charsmap: its trie is cut");
    units_.resize(trie_bytes / 4);
    std::memcpy(units_.data(), blob.data(), trie_bytes);
    replacements_ = blob.substr(trie_bytes);
    replacements_.push_back('\0');
}

std::optional<std::string_view> Charsmap::replacement(std::string_view text) const {
    if (units_.empty()) return std::nullopt;
    std::size_t position = offset(units_[0]);
    for (const char c : text) {
        const auto byte = static_cast<unsigned char>(c);
        position ^= byte;
        if (byte == 0 || position >= units_.size()) return std::nullopt;
        const std::uint32_t unit = units_[position];
        if (label(unit) != byte) return std::nullopt;
        position ^= offset(unit);
        if (position >= units_.size()) return std::nullopt;
        if (!has_leaf(unit)) continue;
        const std::size_t start = value(units_[position]);
        if (start >= replacements_.size()) return std::nullopt;
        return std::string_view(replacements_.c_str() + start);
    }
    return std::nullopt;
}

}  // namespace ivy
