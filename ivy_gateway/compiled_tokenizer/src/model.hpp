// What every kind of tokenizer offers, and the memory one thread needs for it.
#pragma once

#include <cstdint>
#include <limits>

#include "byte_merges.hpp"
#include "form_c.hpp"
#include "memory.hpp"
#include "text.hpp"
#include "viterbi.hpp"
#include "word_cache.hpp"

namespace ivy {

// Owned by one thread at a time, and kept for the next call. The cache belongs to one tokenizer.
struct Scratch {
    static constexpr std::size_t kSlack = WordCache::kMaxCodes + 1;  // read beyond a word's end

    explicit Scratch(std::size_t num_cached_words) : cache(num_cached_words) {}

    Vector<std::int32_t> tokens;
    Vector<Code> word = Vector<Code>(ShortWord::kMaxWord + kSlack);
    ShortWord short_word;
    LongWord long_word;
    NormalizedText normalized;
    Vector<std::uint8_t> bytes;  // of one word
    ByteMerges::LongWord long_bytes;
    WordCache cache;
};

class Model {
public:
    static constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();

    Model() = default;
    Model(const Model&) = delete;
    Model& operator=(const Model&) = delete;
    virtual ~Model() = default;

    // How many words the cache of a scratch has room for: a power of two.
    virtual std::size_t num_cached_words() const { return WordCache::kNumEntries; }

    // Appends the ids of `text`, without special tokens of a template. Stops early once there are `limit`:
    // there may be some more. False for a text that only the library can encode; its ids mean nothing then.
    virtual bool encode(const Text& text, std::size_t limit, Scratch& scratch) const = 0;
};

}  // namespace ivy
