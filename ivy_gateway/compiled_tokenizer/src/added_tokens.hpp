// Special tokens that are cut out of the raw text before anything else: leftmost, of those the longest.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "text.hpp"

namespace ivy {

struct AddedToken {
    std::u32string content;  // not empty
    std::int32_t id;
    bool strips_left, strips_right;  // white space beside it goes with it
};

class AddedTokens {
public:
    struct Match {
        std::size_t start, end;
        std::int32_t id;
    };

    AddedTokens() = default;
    explicit AddedTokens(std::vector<AddedToken> tokens);

    bool empty() const { return tokens_.empty(); }

    // The first token at or after `from`, with the white space it strips, though none before `from`.
    template <class Unit>
    std::optional<Match> find(const Unit* text, std::size_t size, std::size_t from) const {
        for (std::size_t i = from; i < size; ++i) {
            if (!may_start(text[i])) continue;
            const std::int32_t index = longest(text + i, size - i);
            if (index >= 0) return stripped(tokens_[static_cast<std::size_t>(index)], text, size, from, i);
        }
        return std::nullopt;
    }

private:
    // A node of the tokens' trie: the characters that lead on, and the token that ends here, or -1.
    struct Node {
        std::vector<std::pair<char32_t, std::uint32_t>> children;
        std::int32_t token = -1;

        std::uint32_t child(char32_t c) const {
            for (const auto& [character, node] : children)
                if (character == c) return node;
            return 0;
        }
    };

    bool may_start(char32_t c) const {
        return c < 128 ? (ascii_starts_[c / 64] >> c % 64 & 1U) != 0 : starts_beyond_ascii_ && nodes_[0].child(c) != 0;
    }

    // The longest token at the start of `text`, or -1.
    template <class Unit>
    std::int32_t longest(const Unit* text, std::size_t size) const {
        std::int32_t found = -1;
        std::uint32_t node = 0;
        for (std::size_t i = 0; i < size && (node = nodes_[node].child(text[i])) != 0; ++i)
            if (nodes_[node].token >= 0) found = nodes_[node].token;
        return found;
    }

    template <class Unit>
    static Match stripped(const AddedToken& token, const Unit* text, std::size_t size, std::size_t from,
                          std::size_t start) {
        std::size_t end = start + token.content.size();
        while (token.strips_left && start > from && is_white_space(text[start - 1])) --start;
        while (token.strips_right && end < size && is_white_space(text[end])) ++end;
        return {start, end, token.id};
    }

    std::vector<AddedToken> tokens_;
    std::vector<Node> nodes_ = std::vector<Node>(1);  // the root first
    std::uint64_t ascii_starts_[2] = {};              // a bit for each character that a token starts with
    bool starts_beyond_ascii_ = false;
};

}  // namespace ivy
