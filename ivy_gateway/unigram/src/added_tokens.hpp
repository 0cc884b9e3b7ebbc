// Special tokens that are cut out of the raw text before anything else: leftmost, of those the longest.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
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
            for (const AddedToken& token : tokens_)
                if (matches(token.content, text + i, size - i)) return stripped(token, text, size, from, i);
        }
        return std::nullopt;
    }

private:
    bool may_start(char32_t c) const { return starts_.find(c) != std::u32string::npos; }

    template <class Unit>
    static bool matches(const std::u32string& content, const Unit* text, std::size_t size) {
        if (content.size() > size) return false;
        for (std::size_t i = 0; i < content.size(); ++i)
            if (text[i] != content[i]) return false;
        return true;
    }

    template <class Unit>
    static Match stripped(const AddedToken& token, const Unit* text, std::size_t size, std::size_t from,
                          std::size_t start) {
        std::size_t end = start + token.content.size();
        while (token.strips_left && start > from && is_white_space(text[start - 1])) --start;
        while (token.strips_right && end < size && is_white_space(text[end])) ++end;
        return {start, end, token.id};
    }

    std::vector<AddedToken> tokens_;  // longest first
    std::u32string starts_;           // their first characters, each once
};

}  // namespace ivy
