// What a tokenizer does with each code point: one table that holds normalization, splitting and numbering.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "graphemes.hpp"
#include "memory.hpp"
#include "paged_table.hpp"
#include "text.hpp"
#include "trie.hpp"

namespace ivy {

// What one character of normalized text does.
enum class Action : std::uint8_t {
    Push,     // it goes into the word
    Start,    // it starts a word (the meta symbol)
    Space,    // as `Start`; several in a row count once where the tokenizer collapses them
    End,      // it ends the word and is dropped
    Isolate,  // it is a word of its own
    Replace,  // other characters stand for it
    Reorder,  // as `Push`, but its place among other marks is not its own: see `wordpiece.hpp`
};

// An action with its character, and with what decides about grapheme clusters.
class Entry {
public:
    Entry() = default;
    Entry(Action action, std::uint16_t value) : bits_(value | static_cast<std::uint32_t>(action) << 16) {}

    Entry with_cluster(char32_t c, Break kind) const {
        Entry entry = *this;
        entry.bits_ |= (utf8_length(c) - 1) << 20 | (is_joiner(kind) ? kJoins : 0U) |
                       (kind == Break::Prepend || kind == Break::CR ? kLeads : 0U);
        if (kind == Break::LF) entry.bits_ |= kJoins;  // after CR, which the slow path checks
        return entry;
    }

    Action action() const { return static_cast<Action>(bits_ >> 16 & 0xFU); }
    Code code() const { return static_cast<Code>(bits_); }
    std::uint16_t replacement() const { return static_cast<std::uint16_t>(bits_); }
    bool is_push() const { return (bits_ & 0xF0000U) == 0; }

    // Whether `next` may be joined to this one in a cluster of less than six bytes.
    bool may_join(Entry next) const {
        return ((next.bits_ & kJoins) | (bits_ & kLeads)) != 0 &&
               (bits_ >> 20 & 3U) + (next.bits_ >> 20 & 3U) + 2 < 6;
    }
    bool operator==(Entry other) const { return bits_ == other.bits_; }

private:
    static constexpr std::uint32_t kJoins = 1U << 22, kLeads = 1U << 23;
    std::uint32_t bits_ = 0;
};

// The numbers of the characters of a vocabulary: frequent ones first, so that a trie's slots lie close.
class Alphabet {
public:
    static constexpr Code kUnknown = 0, kMeta = 1;
    static constexpr char32_t kMetaSymbol = 0x2581;

    // Throws std::length_error for more than 65,000 different characters.
    explicit Alphabet(const std::vector<std::u32string>& pieces);

    Code code(char32_t c) const;
    CodeString encode(std::u32string_view text) const;
    std::size_t size() const { return codes_.size() + 1; }

private:
    std::unordered_map<char32_t, Code> codes_;
};

// The entry of each code point.
using CharTable = PagedTable<Entry>;

// Strings of entries that stand for one code point.
class Replacements {
public:
    // Throws std::length_error for more than 65,000 different ones.
    std::uint16_t add(const std::vector<Entry>& entries);

    const Entry* begin(std::uint16_t index) const { return entries_.data() + starts_[index]; }
    const Entry* end(std::uint16_t index) const { return entries_.data() + starts_[index + 1U]; }

private:
    std::vector<Entry> entries_;
    std::vector<std::uint32_t> starts_{0};
};

}  // namespace ivy
