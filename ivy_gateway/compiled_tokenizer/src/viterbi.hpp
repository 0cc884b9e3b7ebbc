// The best segmentation of a word under a Unigram model: Kudo 2018, https://arxiv.org/abs/1804.10959, eq. 7.
//
// Scores are summed in float64 from the word's start; of equal sums the one found first stays, as in the
// library. A character that is no piece by itself may be unknown, at ten below the lowest score.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "memory.hpp"
#include "trie.hpp"

namespace ivy {

struct UnigramModel {
    Trie trie;
    Vector<double> scores;  // [tokens]
    double unknown_score = 0;
    std::int32_t unknown_token = 0;
    std::size_t max_piece = 1;  // the longest piece, in characters

    // Calls `relax(length, token, score)` for every piece that starts at `codes`, shortest first. The codes
    // end with one that no piece has. What is no piece by itself is unknown.
    template <class Relax>
    void for_each_piece(const Code* codes, Relax&& relax) const {
        Slot slot = trie.child(trie.root(), *codes);
        if (slot.label() != *codes) {
            relax(1, unknown_token, unknown_score);
            return;
        }
        if (slot.has_token()) {
            relax(1, slot.token(), scores[static_cast<std::size_t>(slot.token())]);
        } else {
            relax(1, unknown_token, unknown_score);
        }
        for (std::int32_t length = 2; slot.base() != 0; ++length) {
            const Code code = *++codes;
            slot = trie.child(slot.base(), code);
            if (slot.label() != code) return;
            if (slot.has_token()) relax(length, slot.token(), scores[static_cast<std::size_t>(slot.token())]);
        }
    }
};

// For words that are known whole: up to `kMaxWord` codes.
class ShortWord {
public:
    static constexpr std::size_t kMaxWord = 256;

    // `codes[size]` exists and is 0.
    void encode(const UnigramModel& model, const Code* codes, std::size_t size, Vector<std::int32_t>& out);

private:
    struct Node {
        double score;
        std::int32_t token, length;  // of the piece that ends here on the best path
    };
    Vector<Node> nodes_ = Vector<Node>(kMaxWord + 1);
};

// For longer words, part by part: tokens leave as soon as all paths that are still open agree on them, so a
// word of any length takes little memory unless its paths never meet.
class LongWord {
public:
    bool open() const { return !codes_.empty(); }
    void append(const UnigramModel& model, const Code* codes, std::size_t size, Vector<std::int32_t>& out);
    void finish(const UnigramModel& model, Vector<std::int32_t>& out);
    void drop();

private:
    static constexpr std::size_t kMinAttempt = 512;   // pending characters before paths are compared
    static constexpr std::size_t kMaxKept = 1U << 16;  // capacity that is kept for the next word

    void begin(const UnigramModel& model);
    void advance(const UnigramModel& model, std::size_t end);
    std::size_t common_ancestor(std::size_t reach);
    void emit(std::size_t end, const UnigramModel& model, Vector<std::int32_t>& out);
    void forget(std::size_t count);
    double& score(std::size_t position) { return scores_[(origin_ + position) & (scores_.size() - 1)]; }

    Vector<Code> codes_;  // pending characters; positions below are between them
    Vector<std::int32_t> tokens_;
    Vector<std::uint16_t> lengths_;
    Vector<std::uint16_t> path_;   // lengths, from the end
    Vector<std::uint8_t> marked_;
    Vector<double> scores_;        // a ring: of positions that a piece can still reach
    std::size_t origin_ = 0;       // of the ring
    std::size_t start_ = 0;        // the next position whose pieces are looked up
    std::size_t next_attempt_ = kMinAttempt;
    bool after_unknown_ = false;
};

}  // namespace ivy
