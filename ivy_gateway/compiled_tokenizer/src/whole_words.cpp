#include "whole_words.hpp"

#include <cstring>
#include <stdexcept>

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

WholeWords::WholeWords(const std::vector<std::pair<std::string, std::int32_t>>& words) {
    std::size_t num_slots = 16;
    while (num_slots < words.size() + words.size() / 2) num_slots *= 2;
    slots_.assign(num_slots, Slot());
    for (const auto& [word, token] : words) {
        const Head head{token, static_cast<std::uint32_t>(word.size())};
        words_.resize(words_.size() + sizeof head);
        std::memcpy(words_.data() + words_.size() - sizeof head, &head, sizeof head);
        const std::size_t end = words_.size();
        words_.insert(words_.end(), word.begin(), word.end());
        if (words_.size() > UINT32_MAX) throw std::length_error("bpe: too many pieces");
        const std::uint64_t hash = hash_of(words_.data() + end, word.size());
        std::size_t i = hash & (num_slots - 1);
        while (slots_[i].end != 0) i = (i + 1) & (num_slots - 1);
        slots_[i] = {static_cast<std::uint32_t>(hash >> 32), static_cast<std::uint32_t>(end)};
    }
}

std::int32_t WholeWords::find(const std::uint8_t* word, std::size_t size) const {
    const std::uint64_t hash = hash_of(word, size);
    for (std::size_t i = hash & (slots_.size() - 1);; i = (i + 1) & (slots_.size() - 1)) {
        const Slot slot = slots_[i];
        if (slot.end == 0) return -1;
        if (slot.hash != static_cast<std::uint32_t>(hash >> 32)) continue;
        const std::uint8_t* const known = words_.data() + slot.end;
        Head head;
        std::memcpy(&head, known - sizeof head, sizeof head);
        if (head.size == size && std::memcmp(known, word, size) == 0) return head.token;
    }
}

}  // namespace ivy
