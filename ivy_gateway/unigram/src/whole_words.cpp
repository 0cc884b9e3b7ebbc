#include "whole_words.hpp"

#include <cstring>

namespace ivy {
namespace {

std::uint64_t mixed(std::uint64_t hash, std::uint64_t value) {
    hash = (hash ^ value) * 0x9E3779B97F4A7C15ULL;  // 2^64 over the golden ratio
    return hash ^ hash >> 32;
}

std::uint64_t hash_of(const std::uint8_t* bytes, std::size_t size) {
    std::uint64_t hash = size;
    for (; size >= 8; bytes += 8, size -= 8) {
        std::uint64_t value;
        std::memcpy(&value, bytes, sizeof value);
        hash = mixed(hash, value);
    }
    std::uint64_t rest = 0;
    for (std::size_t i = 0; i < size; ++i) rest = rest << 8 | bytes[i];
    return mixed(hash, rest);
}

}  // namespace

WholeWords::WholeWords(const std::vector<std::pair<std::string, std::int32_t>>& words) : starts_{0} {
    std::size_t num_slots = 16;
    while (num_slots < 2 * words.size()) num_slots *= 2;
    slots_.assign(num_slots, Slot());
    for (const auto& [word, token] : words) {
        bytes_.insert(bytes_.end(), word.begin(), word.end());
        starts_.push_back(static_cast<std::uint32_t>(bytes_.size()));
        tokens_.push_back(token);
        const std::uint64_t hash = hash_of(bytes_.data() + starts_[tokens_.size() - 1], word.size());
        std::size_t i = hash & (num_slots - 1);
        while (slots_[i].index_plus_1 != 0) i = (i + 1) & (num_slots - 1);
        slots_[i] = {static_cast<std::uint32_t>(hash >> 32), static_cast<std::uint32_t>(tokens_.size())};
    }
}

std::int32_t WholeWords::find(const std::uint8_t* word, std::size_t size) const {
    const std::uint64_t hash = hash_of(word, size);
    for (std::size_t i = hash & (slots_.size() - 1);; i = (i + 1) & (slots_.size() - 1)) {
        const Slot slot = slots_[i];
        if (slot.index_plus_1 == 0) return -1;
        if (slot.hash != static_cast<std::uint32_t>(hash >> 32)) continue;
        const std::uint32_t start = starts_[slot.index_plus_1 - 1];
        if (starts_[slot.index_plus_1] - start == size && std::memcmp(bytes_.data() + start, word, size) == 0)
            return tokens_[slot.index_plus_1 - 1];
    }
}

}  // namespace ivy
