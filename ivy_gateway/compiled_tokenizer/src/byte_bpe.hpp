// The whole pipeline of byte-level BPE in one pass: a pattern splits the text, each word's bytes are merged.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "added_tokens.hpp"
#include "byte_merges.hpp"
#include "form_c.hpp"
#include "model.hpp"
#include "split_pattern.hpp"
#include "whole_words.hpp"

namespace ivy {

struct ByteBpeOptions {
    std::vector<std::pair<std::string, std::int32_t>> pieces;  // their bytes, and their ids
    std::vector<MergeRule> merges;                             // in the order in which they were learned
    bool ignores_merges = false;                               // where a word is a piece
    bool adds_space = false;                                   // before a text that begins with none; GPT-2 alone
    SplitPatternOptions pattern;
    std::optional<FormCOptions> form_c;             // what stands between the first added tokens is put into it
    std::vector<AddedToken> added_tokens;           // cut out of the raw text
    std::vector<AddedToken> normalized_tokens;      // then these out of what is left, normalized
};

class ByteBpe final : public Model {
public:
    // Throws std::length_error or std::invalid_argument for options that do not fit.
    explicit ByteBpe(ByteBpeOptions options);

    // Two mebibytes: a word that is not there costs some twenty look-ups, each perhaps in slow memory.
    std::size_t num_cached_words() const override { return 4 * WordCache::kNumEntries; }

    bool encode(const Text& text, std::size_t limit, Scratch& scratch) const override;

private:
    class Words;

    template <class Unit>
    void encode_raw(const Unit* text, std::size_t size, Scratch& scratch, Words& words) const;
    template <class Unit>
    void encode_normalized(const Unit* text, std::size_t size, Words& words) const;
    template <class Unit>
    void encode_between(const Unit* text, std::size_t size, Words& words) const;
    std::vector<std::pair<std::string, std::int32_t>> whole_words(const ByteBpeOptions& options) const;

    bool adds_space_;
    SplitPattern pattern_;
    std::optional<FormC> form_c_;
    ByteMerges merges_;
    WholeWords whole_words_;
    AddedTokens added_tokens_, normalized_tokens_;
};

}  // namespace ivy
