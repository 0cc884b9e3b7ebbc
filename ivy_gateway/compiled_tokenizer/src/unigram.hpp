// The whole Unigram pipeline in one pass: charsmap, white space, meta symbol, best segmentation of each word.
#pragma once

#include <string>
#include <vector>

#include "added_tokens.hpp"
#include "alphabet.hpp"
#include "charsmap.hpp"
#include "model.hpp"
#include "viterbi.hpp"

namespace ivy {

struct UnigramOptions {
    std::vector<std::u32string> pieces;  // in the order of their ids
    std::vector<double> scores;
    std::int32_t unknown_token = 0;
    std::string charsmap;              // empty: nothing is normalized
    bool splits_white_space = false;   // white space ends words and is dropped; else a space starts a word
    bool collapses_spaces = false;     // several spaces in a row count once
    std::vector<AddedToken> added_tokens;
};

class Unigram final : public Model {
public:
    // Throws std::length_error or std::invalid_argument for options that do not fit.
    explicit Unigram(UnigramOptions options);

    bool encode(const Text& text, std::size_t limit, Scratch& scratch) const override;

private:
    class Words;

    template <class Unit>
    void encode_units(const Unit* text, std::size_t size, Words& words) const;
    template <class Unit>
    void encode_between(const Unit* text, std::size_t size, Words& words) const;
    template <class Unit>
    std::size_t replace_cluster(const Unit* text, std::size_t size, std::size_t start, Words& words) const;
    template <class Unit>
    bool starts_cluster(const Unit* text, std::size_t position) const;
    Break kind(char32_t c) const { return properties_.kinds[c]; }

    Entry entry_of(char32_t c);
    Entry plain_entry(char32_t c) const;
    std::vector<Entry> plain_entries(std::string_view utf8) const;

    // Asked only where a short cluster is possible.
    struct Properties {
        std::vector<Break> kinds;
        std::vector<Conjunct> conjuncts;
        Properties();
    };

    bool splits_white_space_, collapses_spaces_;
    Charsmap charsmap_;
    Alphabet alphabet_;
    Properties properties_;
    Replacements replacements_;
    CharTable table_;
    UnigramModel model_;
    AddedTokens added_tokens_;
};

}  // namespace ivy
