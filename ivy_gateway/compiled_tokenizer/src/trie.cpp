#include "trie.hpp"

#include <algorithm>
#include <deque>
#include <stdexcept>

namespace ivy {

// Places the nodes level by level, each node's children at once, into the first free slots that fit.
class TrieBuilder {
public:
    TrieBuilder(Trie& trie, std::vector<Trie::Key> keys, std::size_t num_codes)
        : trie_(trie), keys_(std::move(keys)) {
        std::stable_sort(keys_.begin(), keys_.end(), [](const auto& a, const auto& b) { return a.codes < b.codes; });
        for (const Trie::Key& key : keys_)
            if (key.token < 0 || key.token > static_cast<std::int32_t>(Slot::kMaxToken))
                throw std::length_error("trie: a token's number needs more than 24 bits");
        while (block_ < num_codes) block_ *= 2;
    }

    void build() {
        trie_.slots_.clear();
        grow();
        taken_base_[0] = true;  // means "no children"
        std::deque<Node> waiting{{0, keys_.size(), 0, kRootSlot}};
        for (; !waiting.empty(); waiting.pop_front()) place(waiting.front(), waiting);
    }

private:
    static constexpr std::size_t kRootSlot = SIZE_MAX;
    static constexpr unsigned kMaxTries = 64;  // free slots that are tried before a cursor moves on
    static constexpr std::size_t kNumCursors = 16;

    // Keys [first, last) share `depth` codes; `slot` is theirs.
    struct Node {
        std::size_t first, last, depth, slot;
    };
    struct Child {
        Code code;
        std::size_t first, last;
    };

    void place(const Node& node, std::deque<Node>& waiting) {
        std::size_t first = node.first;
        std::uint32_t token_plus_1 = 0;
        for (; first < node.last && keys_[first].codes.size() == node.depth; ++first)
            token_plus_1 = static_cast<std::uint32_t>(keys_[first].token) + 1;
        split(first, node);
        const std::uint32_t base = children_.empty() ? 0 : find_base();
        if (node.slot == kRootSlot) {
            trie_.root_ = base;
        } else {
            trie_.slots_[node.slot] = Slot(base, keys_[node.first].codes[node.depth - 1], token_plus_1);
        }
        for (const Child& child : children_) {
            const std::size_t slot = base ^ child.code;
            taken_[slot] = true;
            waiting.push_back({child.first, child.last, node.depth + 1, slot});
        }
    }

    void split(std::size_t first, const Node& node) {
        children_.clear();
        while (first < node.last) {
            const Code code = keys_[first].codes[node.depth];
            std::size_t last = first + 1;
            while (last < node.last && keys_[last].codes[node.depth] == code) ++last;
            children_.push_back({code, first, last});
            first = last;
        }
    }

    // The first base at or after the cursor of nodes of about this many children where all of them are free.
    // A cursor moves on when it finds little: what lies behind it is left to nodes of fewer children.
    std::uint32_t find_base() {
        std::size_t& cursor = cursors_[std::min<std::size_t>(children_.size() / 2, kNumCursors - 1)];
        while (cursor < taken_.size() && taken_[cursor]) ++cursor;
        unsigned tries = 0;
        for (std::size_t slot = cursor; slot < taken_.size(); ++slot) {
            if (taken_[slot]) continue;
            const std::size_t base = slot ^ children_[0].code;
            if (fits(base)) return claim(base);
            if (++tries % kMaxTries == 0) cursor = slot;
        }
        cursor = taken_.size();
        grow();
        return claim(cursor);
    }

    bool fits(std::size_t base) const {
        return !taken_base_[base] && std::none_of(children_.begin(), children_.end(),
                                                  [&](const Child& child) { return taken_[base ^ child.code]; });
    }

    std::uint32_t claim(std::size_t base) {
        taken_base_[base] = true;
        return static_cast<std::uint32_t>(base);
    }

    void grow() {
        const std::size_t size = trie_.slots_.size() + block_;
        if (size > std::size_t{Slot::kMaxBase} + 1) throw std::length_error("trie: more than 2^24 slots");
        trie_.slots_.resize(size);
        taken_.resize(size);
        taken_base_.resize(size);
    }

    Trie& trie_;
    std::vector<Trie::Key> keys_;
    std::size_t block_ = 2;  // slots that the XOR with one character can reach
    std::vector<bool> taken_, taken_base_;
    std::vector<Child> children_;
    std::size_t cursors_[kNumCursors] = {};
};

Trie::Trie(std::vector<Key> keys, std::size_t num_codes) {
    TrieBuilder(*this, std::move(keys), num_codes).build();
}

}  // namespace ivy
