// Byte pair encoding of one word: the pair that was learned first becomes one token, again and again.
//
// Sennrich et al. 2016, https://arxiv.org/abs/1508.07909, algorithm 1, over bytes. Of equal pairs the leftmost
// goes first. Short words are searched for their best pair each time, long ones keep a heap of pairs, so that
// the time of a word of n bytes is n log n.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "memory.hpp"

namespace ivy {

struct MergeRule {
    std::int32_t left, right, merged;
};

class ByteMerges {
public:
    // Memory for long words.
    class LongWord {
    public:
        void drop();

    private:
        friend class ByteMerges;
        static constexpr std::size_t kMaxKept = 1U << 14;  // positions whose memory is kept for the next word

        struct Symbol {
            std::int32_t token;
            std::uint32_t rank;            // of the pair with the next symbol
            std::uint32_t previous, next;
        };
        Vector<Symbol> symbols_;
        Vector<std::uint64_t> heap_;  // rank and position of pairs, some of them gone by now
    };

    // `rules` in the order in which they were learned; `bytes`: the token of each byte.
    // Throws std::length_error for more than 2^21 tokens or 2^22 rules.
    ByteMerges(const std::vector<MergeRule>& rules, const std::array<std::int32_t, 256>& bytes);

    // Appends the tokens of `word`.
    void encode(const std::uint8_t* word, std::size_t size, LongWord& memory, Vector<std::int32_t>& out) const;

private:
    static constexpr std::size_t kMaxShort = 64;
    static constexpr std::uint32_t kNoRank = (1U << 22) - 1;
    static constexpr std::size_t kFilterBits = 1U << 21;  // a quarter of a mebibyte
    static constexpr std::uint32_t kNowhere = 0xFFFFFFFF;

    static std::uint64_t key(std::int32_t left, std::int32_t right) {
        return std::uint64_t{static_cast<std::uint32_t>(left)} << 21 | static_cast<std::uint32_t>(right);
    }
    static std::uint64_t hash(std::uint64_t key) { return key * 0x9E3779B97F4A7C15ULL; }  // 2^64 over the golden ratio
    void add(const MergeRule& rule, std::uint32_t rank);
    std::uint32_t rank(std::int32_t left, std::int32_t right) const;
    void encode_short(const std::uint8_t* word, std::size_t size, Vector<std::int32_t>& out) const;
    void encode_long(const std::uint8_t* word, std::size_t size, LongWord& memory, Vector<std::int32_t>& out) const;
    void fill(const std::uint8_t* word, std::size_t size, LongWord& memory) const;
    void push(std::uint32_t position, LongWord& memory) const;

    std::array<std::int32_t, 256> bytes_;
    Vector<std::uint32_t> byte_ranks_;   // of pairs of bytes
    Vector<std::int32_t> merged_;        // by rank
    // Key and rank of each rule; open addressing. Most pairs have no rule: a small table tells most of them.
    Vector<std::uint64_t> slots_;
    Vector<std::uint64_t> filter_ = Vector<std::uint64_t>(kFilterBits / 64);
    unsigned shift_ = 0;
};

}  // namespace ivy
