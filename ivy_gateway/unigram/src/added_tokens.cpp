#include "added_tokens.hpp"

#include <algorithm>

namespace ivy {

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
    std::stable_sort(tokens_.begin(), tokens_.end(),
                     [](const auto& a, const auto& b) { return a.content.size() > b.content.size(); });
    for (const AddedToken& token : tokens_)
        if (!may_start(token.content[0])) starts_.push_back(token.content[0]);
}

}  // namespace ivy
