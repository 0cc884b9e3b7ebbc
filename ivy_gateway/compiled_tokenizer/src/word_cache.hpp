// The tokens of short words seen before: a fixed number of entries, each one cache line; a new word replaces
// the one in its place.
#pragma once

#include <cstdint>
#include <cstring>

#include "memory.hpp"
#include "trie.hpp"

namespace ivy {

class WordCache {
public:
    static constexpr std::size_t kMaxCodes = 15, kMaxTokens = 8;
    static constexpr std::size_t kMaxBytes = kMaxCodes * sizeof(Code);
    static constexpr std::size_t kNumEntries = 8192;  // half a mebibyte, unless a tokenizer wants more

    // `num_entries`: a power of two.
    explicit WordCache(std::size_t num_entries) : lines_(num_entries) {}

    // One word: its codes or bytes, padded with zeros, and one more than their number.
    struct Key {
        std::uint64_t words[4];
    };

    // At most `kMaxCodes` codes or `kMaxBytes` bytes; in one cache either all words are codes or all are bytes.
    template <class Unit>
    static Key key(const Unit* word, std::size_t size) {
        Key key{};
        std::memcpy(&key, word, size * sizeof(Unit));
        key.words[3] |= std::uint64_t{size + 1} << 48;
        return key;
    }

    // Appends the tokens of a known word; false for another.
    bool find(const Key& key, Vector<std::int32_t>& out) const {
        const Line& line = lines_[place(key)];
        const std::uint64_t differs = (line.key.words[0] ^ key.words[0]) | (line.key.words[1] ^ key.words[1]) |
                                      (line.key.words[2] ^ key.words[2]) |
                                      ((line.key.words[3] ^ key.words[3]) & ~kCountMask);
        if (differs != 0) return false;
        const std::size_t count = line.key.words[3] >> 56;
        const std::size_t size = out.size();
        out.resize(size + kMaxTokens);  // a copy of fixed length is faster than one of `count`
        std::memcpy(out.data() + size, line.tokens, sizeof line.tokens);
        out.resize(size + count);
        return true;
    }

    void keep(const Key& key, const std::int32_t* tokens, std::size_t count) {
        if (count > kMaxTokens) return;
        Line& line = lines_[place(key)];
        line.key = key;
        line.key.words[3] |= std::uint64_t{count} << 56;
        std::memcpy(line.tokens, tokens, count * sizeof(std::int32_t));
    }

private:
    static constexpr std::uint64_t kCountMask = 0xFFULL << 56;

    struct alignas(64) Line {
        Key key;
        std::int32_t tokens[kMaxTokens];
    };

    std::size_t place(const Key& key) const {
        std::uint64_t hash = 0;
        for (const std::uint64_t word : key.words) {
            hash = (hash ^ word) * 0x9E3779B97F4A7C15ULL;  // 2^64 over the golden ratio
            hash ^= hash >> 32;
        }
        return hash & (lines_.size() - 1);
    }

    Vector<Line> lines_;  // of no words yet: their number would be 0
};

}  // namespace ivy
