// A trie over characters: a double array whose children lie at `base XOR character`, eight bytes a slot.
#pragma once

#include <cstdint>
#include <vector>

#include "memory.hpp"

namespace ivy {

// The number of a character within a vocabulary; 0 is every character that no piece has.
using Code = std::uint16_t;
using CodeString = std::vector<Code>;

// One slot: where its children are, the character that leads here, and the token that ends here.
class Slot {
public:
    static constexpr std::uint32_t kMaxBase = (1U << 24) - 1, kMaxToken = (1U << 24) - 2;
    static constexpr Code kNoLabel = 0xFFFF;

    Slot() : Slot(0, kNoLabel, 0) {}
    Slot(std::uint32_t base, Code label, std::uint32_t token_plus_1)
        : bits_(std::uint64_t{token_plus_1} << 40 | std::uint64_t{base} << 16 | label) {}

    Code label() const { return static_cast<Code>(bits_); }
    std::uint32_t base() const { return static_cast<std::uint32_t>(bits_ >> 16) & kMaxBase; }  // 0: no children
    bool has_token() const { return bits_ >> 40 != 0; }
    std::int32_t token() const { return static_cast<std::int32_t>(bits_ >> 40) - 1; }

private:
    std::uint64_t bits_;
};

class Trie {
public:
    struct Key {
        CodeString codes;  // none 0, none kNoLabel
        std::int32_t token;
    };

    Trie() = default;

    // Of two equal keys the later one counts; empty ones never match. All codes, of keys and of texts, are
    // below `num_codes`. Throws std::length_error for a vocabulary that does not fit into the bits of a slot.
    Trie(std::vector<Key> keys, std::size_t num_codes);

    std::uint32_t root() const { return root_; }
    Slot child(std::uint32_t base, Code code) const { return slots_[base ^ code]; }

private:
    friend class TrieBuilder;
    Vector<Slot> slots_ = Vector<Slot>(1U << 16);  // any character finds nothing
    std::uint32_t root_ = 0;
};

}  // namespace ivy
