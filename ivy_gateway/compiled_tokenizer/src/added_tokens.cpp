#include "added_tokens.hpp"

namespace ivy {

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
    for (std::size_t i = 0; i < tokens_.size(); ++i) {
        const std::u32string& content = tokens_[i].content;
        std::uint32_t node = 0;
        for (const char32_t c : content) {
            std::uint32_t next = nodes_[node].child(c);
            if (next == 0) {
                next = static_cast<std::uint32_t>(nodes_.size());
                nodes_[node].children.emplace_back(c, next);
                nodes_.emplace_back();
            }
            node = next;
        }
        if (nodes_[node].token < 0) nodes_[node].token = static_cast<std::int32_t>(i);  // of equal ones the first
        if (content[0] < 128) {
            ascii_starts_[content[0] / 64] |= std::uint64_t{1} << content[0] % 64;
        } else {
            starts_beyond_ascii_ = true;
        }
    }
}

}  // namespace ivy
