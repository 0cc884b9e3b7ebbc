#include "wordpiece.hpp"

#include <cstring>
#include <stdexcept>

namespace ivy {
namespace {

constexpr std::size_t kNumCodePoints = 0x110000;

bool is_continuation(const std::u32string& piece, const std::u32string& prefix) {
    return !prefix.empty() && piece.compare(0, prefix.size(), prefix) == 0;
}

// The pieces' own characters, without the prefix.
std::vector<std::u32string> spellings(const WordPieceOptions& options) {
    std::vector<std::u32string> found;
    for (const auto& [piece, id] : options.pieces) {
        found.push_back(piece);  // also a continuation is a piece by itself, with its prefix spelled out
        if (is_continuation(piece, options.continuing_prefix))
            found.push_back(piece.substr(options.continuing_prefix.size()));
    }
    return found;
}

Trie build_trie(const WordPieceOptions& options, const Alphabet& alphabet, bool continuations) {
    const std::u32string& prefix = options.continuing_prefix;
    std::vector<Trie::Key> keys;
    for (const auto& [piece, id] : options.pieces) {
        if (continuations && is_continuation(piece, prefix))
            keys.push_back({alphabet.encode(piece.substr(prefix.size())), id});
        if (!continuations) keys.push_back({alphabet.encode(piece), id});
    }
    return Trie(std::move(keys), alphabet.size());
}

}  // namespace

class WordPiece::Words {
public:
    Words(const WordPiece& wordpiece, Scratch& scratch, std::size_t limit)
        : wordpiece_(wordpiece),
          scratch_(scratch),
          word_(scratch.word.data()),
          limit_(limit == kNoLimit ? kNoLimit : scratch.tokens.size() + limit) {}

    bool full() const { return scratch_.tokens.size() >= limit_; }
    bool reordered() const { return reordered_; }

    // False once there are enough tokens.
    bool take(Entry entry) {
        if (entry.is_push()) {
            after_mark_ = false;
            push(entry.code());
            return true;
        }
        take_rare(entry);
        return !full();
    }

    void end_word() {
        if (size_ == 0) return;
        if (size_ > wordpiece_.max_characters_) {
            scratch_.tokens.push_back(wordpiece_.unknown_token_);
        } else {
            std::memset(word_ + size_, 0, Scratch::kSlack * sizeof(Code));
            encode_word();
        }
        size_ = 0;
    }

    void end() {
        end_word();
        after_mark_ = false;
    }

    void special(std::int32_t token) { scratch_.tokens.push_back(token); }

private:
    void take_rare(Entry entry) {
        switch (entry.action()) {
            case Action::Replace: take_all(entry.replacement()); return;
            case Action::Reorder:
                reordered_ |= after_mark_;
                after_mark_ = true;
                push(entry.code());
                return;
            case Action::Isolate:
                end_word();
                push(entry.code());
                break;
            default: break;
        }
        end_word();
        after_mark_ = false;
    }

    void take_all(std::uint16_t replacement) {
        const Entry* const end = wordpiece_.replacements_.end(replacement);
        for (const Entry* part = wordpiece_.replacements_.begin(replacement); part != end; ++part) take(*part);
    }

    void push(Code code) {
        if (size_ < ShortWord::kMaxWord) word_[size_] = code;
        ++size_;
    }

    void encode_word() {
        if (size_ > WordCache::kMaxCodes) return wordpiece_.encode_word(word_, size_, scratch_.tokens);
        const WordCache::Key key = WordCache::key(word_, size_);
        if (scratch_.cache.find(key, scratch_.tokens)) return;
        const std::size_t first = scratch_.tokens.size();
        wordpiece_.encode_word(word_, size_, scratch_.tokens);
        scratch_.cache.keep(key, scratch_.tokens.data() + first, scratch_.tokens.size() - first);
    }

    const WordPiece& wordpiece_;
    Scratch& scratch_;
    Code* word_;
    std::size_t limit_;
    std::size_t size_ = 0;  // characters of the word; the buffer holds the first of them
    bool after_mark_ = false, reordered_ = false;
};

WordPiece::WordPiece(WordPieceOptions options)
    : unknown_token_(options.unknown_token),
      max_characters_(options.max_characters),
      alphabet_(spellings(options)),
      table_(build_table(options)),
      starts_(build_trie(options, alphabet_, false)),
      continuations_(build_trie(options, alphabet_, true)),
      added_tokens_(std::move(options.added_tokens)) {
    if (max_characters_ > ShortWord::kMaxWord) throw std::length_error("wordpiece: words of more than 256 characters");
}

CharTable WordPiece::build_table(const WordPieceOptions& options) {
    std::vector<Action> actions(kNumCodePoints, Action::Push);
    for (const char32_t c : options.punctuation) actions.at(c) = Action::Isolate;
    for (const char32_t c : options.reordering) actions.at(c) = Action::Reorder;
    std::vector<Entry> entries;
    for (char32_t c = 0; c < kNumCodePoints; ++c) entries.push_back(plain_entry(c, actions[c]));
    const std::vector<Entry> plain = entries;
    for (const auto& [c, text] : options.normalized) {
        std::vector<Entry> parts;
        for (const char32_t part : text) parts.push_back(plain.at(part));
        entries.at(c) = Entry(Action::Replace, replacements_.add(parts));
    }
    const Entry nothing(Action::Replace, replacements_.add({}));
    for (const auto& [first, last] : options.removed)
        for (char32_t c = first; c <= last; ++c) entries.at(c) = nothing;
    for (const char32_t c : options.isolated) entries.at(c) = Entry(Action::Isolate, alphabet_.code(c));
    return CharTable([&](char32_t c) { return entries[c]; });
}

// What a character of normalized text does.
Entry WordPiece::plain_entry(char32_t c, Action otherwise) const {
    return is_white_space(c) ? Entry(Action::End, 0) : Entry(otherwise, alphabet_.code(c));
}

bool WordPiece::encode(const Text& text, std::size_t limit, Scratch& scratch) const {
    Words words(*this, scratch, limit);
    return visit(text, [&](const auto* units, std::size_t size) { return encode_units(units, size, words); });
}

template <class Unit>
bool WordPiece::encode_units(const Unit* text, std::size_t size, Words& words) const {
    for (std::size_t from = 0;;) {
        const auto match = added_tokens_.empty() ? std::nullopt : added_tokens_.find(text, size, from);
        const std::size_t end = match ? match->start : size;
        std::size_t i = from;
        while (i < end && words.take(table_[text[i]])) ++i;
        if (i < end) return !words.reordered();
        words.end();
        if (!match || words.full()) return !words.reordered();
        words.special(match->id);
        from = match->end;
    }
}

// The longest piece first; a word that pieces do not cover is unknown as a whole.
void WordPiece::encode_word(const Code* codes, std::size_t size, Vector<std::int32_t>& out) const {
    const std::size_t first = out.size();
    for (std::size_t start = 0; start < size;) {
        const Trie& trie = start == 0 ? starts_ : continuations_;
        std::size_t end = start;
        std::int32_t token = -1;
        std::uint32_t base = trie.root();
        for (std::size_t i = start; i < size && base != 0; ++i) {
            const Slot slot = trie.child(base, codes[i]);
            if (slot.label() != codes[i]) break;
            if (slot.has_token()) {
                token = slot.token();
                end = i + 1;
            }
            base = slot.base();
        }
        if (token < 0) {
            out.resize(first);
            out.push_back(unknown_token_);
            return;
        }
        out.push_back(token);
        start = end;
    }
}

}  // namespace ivy
