#include "byte_merges.hpp"

#include <algorithm>
#include <functional>
#include <stdexcept>

namespace ivy {
namespace {

constexpr std::uint64_t kEmpty = ~std::uint64_t{0};
constexpr std::int32_t kMaxToken = (1 << 21) - 1;
constexpr unsigned kRankBits = 22;

// Of `size` numbers, filled up to a multiple of four with ones that are no less: in fours it is faster.
std::int32_t least_of(const std::int32_t* numbers, std::size_t size) {
    std::int32_t a = numbers[0], b = numbers[1], c = numbers[2], d = numbers[3];
    for (std::size_t i = 4; i < size; i += 4) {
        a = std::min(a, numbers[i]);
        b = std::min(b, numbers[i + 1]);
        c = std::min(c, numbers[i + 2]);
        d = std::min(d, numbers[i + 3]);
    }
    return std::min(std::min(a, b), std::min(c, d));
}

}  // namespace

void ByteMerges::LongWord::drop() {
    if (symbols_.capacity() > kMaxKept) symbols_ = {};
    if (heap_.capacity() > kMaxKept) heap_ = {};
}

ByteMerges::ByteMerges(const std::vector<MergeRule>& rules, const std::array<std::int32_t, 256>& bytes)
    : bytes_(bytes), byte_ranks_(1U << 16) {
    if (rules.size() >= kNoRank) throw std::length_error("bpe: too many merges");
    unsigned bits = 4;
    while ((std::size_t{1} << bits) < rules.size() + rules.size() / 2) ++bits;
    shift_ = 64 - bits;
    slots_.assign(std::size_t{1} << bits, kEmpty);
    for (std::size_t i = 0; i < rules.size(); ++i) add(rules[i], static_cast<std::uint32_t>(i));
    for (std::size_t left = 0; left < 256; ++left)
        for (std::size_t right = 0; right < 256; ++right)
            byte_ranks_[left << 8 | right] = rank(bytes_[left], bytes_[right]);
}

void ByteMerges::add(const MergeRule& rule, std::uint32_t rank) {
    for (const std::int32_t token : {rule.left, rule.right, rule.merged})
        if (token < 0 || token > kMaxToken) throw std::length_error("bpe: a token's number is too large");
    const std::uint64_t pair = key(rule.left, rule.right);
    const std::uint64_t hashed = hash(pair);
    std::size_t i = hashed >> shift_;
    while (slots_[i] != kEmpty) i = (i + 1) & (slots_.size() - 1);
    filter_[(hashed >> 32) % (kFilterBits / 64)] |= 1ULL << (hashed >> 26) % 64;
    slots_[i] = pair << kRankBits | rank;
    merged_.push_back(rule.merged);
}

std::uint32_t ByteMerges::rank(std::int32_t left, std::int32_t right) const {
    const std::uint64_t pair = key(left, right);
    const std::uint64_t hashed = hash(pair);
    if ((filter_[(hashed >> 32) % (kFilterBits / 64)] >> ((hashed >> 26) % 64) & 1U) == 0) return kNoRank;
    for (std::size_t i = hashed >> shift_;; i = (i + 1) & (slots_.size() - 1)) {
        const std::uint64_t slot = slots_[i];
        if (slot >> kRankBits == pair && slot != kEmpty) return static_cast<std::uint32_t>(slot) & kNoRank;
        if (slot == kEmpty) return kNoRank;
    }
}

void ByteMerges::encode(const std::uint8_t* word, std::size_t size, LongWord& memory,
                        Vector<std::int32_t>& out) const {
    if (size <= kMaxShort) return encode_short(word, size, out);
    encode_long(word, size, memory, out);
}

// Each symbol stays at the place of its first byte. The best pair is the least of `pairs`: a rank and a place.
void ByteMerges::encode_short(const std::uint8_t* word, std::size_t size, Vector<std::int32_t>& out) const {
    std::int32_t tokens[kMaxShort];
    std::int32_t pairs[kMaxShort];
    std::uint8_t previous[kMaxShort + 1], next[kMaxShort];
    const auto pair = [](std::uint32_t rank, std::size_t i) {
        return static_cast<std::int32_t>(rank * kMaxShort + i);
    };
    for (std::size_t i = 0; i < size; ++i) {
        tokens[i] = bytes_[word[i]];
        pairs[i] = pair(i + 1 < size ? byte_ranks_[std::size_t{word[i]} << 8 | word[i + 1]] : kNoRank, i);
        previous[i + 1] = static_cast<std::uint8_t>(i);
        next[i] = static_cast<std::uint8_t>(i + 1);
    }
    for (std::size_t i = size; i % 4 != 0; ++i) pairs[i] = pair(kNoRank, 0);
    for (;;) {
        const std::int32_t least = least_of(pairs, size);
        const std::size_t i = static_cast<std::size_t>(least) % kMaxShort;
        const std::size_t best = static_cast<std::size_t>(least) / kMaxShort;
        if (best == kNoRank) break;
        tokens[i] = merged_[best];
        pairs[next[i]] = pair(kNoRank, next[i]);
        next[i] = next[next[i]];
        previous[next[i]] = static_cast<std::uint8_t>(i);
        pairs[i] = pair(next[i] < size ? rank(tokens[i], tokens[next[i]]) : kNoRank, i);
        if (i > 0) pairs[previous[i]] = pair(rank(tokens[previous[i]], tokens[i]), previous[i]);
    }
    for (std::size_t i = 0; i < size; i = next[i]) out.push_back(tokens[i]);
}

void ByteMerges::fill(const std::uint8_t* word, std::size_t size, LongWord& memory) const {
    if (size >= kNowhere) throw std::length_error("bpe: a word of 4 GiB");
    memory.symbols_.resize(size);
    memory.heap_.clear();
    for (std::size_t i = 0; i < size; ++i) {
        const bool last = i + 1 == size;
        const std::uint32_t rank = last ? kNoRank : byte_ranks_[std::size_t{word[i]} << 8 | word[i + 1]];
        const auto here = static_cast<std::uint32_t>(i);
        memory.symbols_[i] = {bytes_[word[i]], rank, i == 0 ? kNowhere : here - 1, last ? kNowhere : here + 1};
        if (rank != kNoRank) memory.heap_.push_back(std::uint64_t{rank} << 32 | here);
    }
    std::make_heap(memory.heap_.begin(), memory.heap_.end(), std::greater<>());
}

// The pair at `position` has changed: takes its rank.
void ByteMerges::push(std::uint32_t position, LongWord& memory) const {
    auto& symbol = memory.symbols_[position];
    symbol.rank = symbol.next == kNowhere ? kNoRank : rank(symbol.token, memory.symbols_[symbol.next].token);
    if (symbol.rank == kNoRank) return;
    memory.heap_.push_back(std::uint64_t{symbol.rank} << 32 | position);
    std::push_heap(memory.heap_.begin(), memory.heap_.end(), std::greater<>());
}

void ByteMerges::encode_long(const std::uint8_t* word, std::size_t size, LongWord& memory,
                             Vector<std::int32_t>& out) const {
    fill(word, size, memory);
    auto& symbols = memory.symbols_;
    while (!memory.heap_.empty()) {
        const std::uint64_t top = memory.heap_.front();
        std::pop_heap(memory.heap_.begin(), memory.heap_.end(), std::greater<>());
        memory.heap_.pop_back();
        const auto position = static_cast<std::uint32_t>(top);
        auto& symbol = symbols[position];
        if (symbol.rank != top >> 32) continue;  // that pair is gone
        auto& right = symbols[symbol.next];
        symbol.token = merged_[symbol.rank];
        symbol.next = right.next;
        right.rank = kNoRank;
        if (symbol.next != kNowhere) symbols[symbol.next].previous = position;
        push(position, memory);
        if (symbol.previous != kNowhere) push(symbol.previous, memory);
    }
    for (std::uint32_t i = 0; i != kNowhere; i = symbols[i].next) out.push_back(symbols[i].token);
}

}  // namespace ivy
