// The whole WordPiece pipeline in one pass: what BERT's normalizer makes of each character, splitting at white
// space and punctuation, the longest piece first in each word.
//
// Characters are normalized one by one. That is exact but for two combining marks in a row that survive and
// whose order normalization may change (`Action::Reorder`): texts with such are left to the library.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "added_tokens.hpp"
#include "alphabet.hpp"
#include "model.hpp"

namespace ivy {

struct WordPieceOptions {
    std::vector<std::pair<std::u32string, std::int32_t>> pieces;  // and their ids
    std::u32string continuing_prefix;
    std::int32_t unknown_token = 0;
    std::size_t max_characters = 100;  // longer words are unknown
    std::vector<std::pair<char32_t, std::u32string>> normalized;  // characters that become others
    std::vector<std::pair<char32_t, char32_t>> removed;           // first and last of each range
    std::u32string isolated;                 // characters that become words of their own
    std::u32string punctuation, reordering;  // of normalized text
    std::vector<AddedToken> added_tokens;
};

class WordPiece final : public Model {
public:
    // Throws std::length_error for options that do not fit.
    explicit WordPiece(WordPieceOptions options);

    bool encode(const Text& text, std::size_t limit, Scratch& scratch) const override;

private:
    class Words;

    template <class Unit>
    bool encode_units(const Unit* text, std::size_t size, Words& words) const;
    CharTable build_table(const WordPieceOptions& options);
    Entry plain_entry(char32_t c, Action otherwise) const;
    void encode_word(const Code* codes, std::size_t size, Vector<std::int32_t>& out) const;

    std::int32_t unknown_token_;
    std::size_t max_characters_;
    Alphabet alphabet_;
    Replacements replacements_;
    CharTable table_;
    Trie starts_, continuations_;
    AddedTokens added_tokens_;
};

}  // namespace ivy
