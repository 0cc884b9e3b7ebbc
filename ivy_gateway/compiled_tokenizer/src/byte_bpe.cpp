#include "byte_bpe.hpp"

#include <array>
#include <stdexcept>

namespace ivy {
namespace {

std::array<std::int32_t, 256> tokens_of_bytes(const ByteBpeOptions& options) {
    std::array<std::int32_t, 256> tokens;
    tokens.fill(-1);
    for (const auto& [piece, id] : options.pieces)
        if (piece.size() == 1) tokens[static_cast<unsigned char>(piece[0])] = id;
    for (const std::int32_t token : tokens)
        if (token < 0) throw std::invalid_argument("bpe: a byte without a piece");
    return tokens;
}

// Calls `between` for what stands between added tokens, and takes these; ends early once there is enough.
template <class Unit, class Words, class Between>
void cut(const AddedTokens& tokens, const Unit* text, std::size_t size, Words& words, const Between& between) {
    std::size_t from = 0;
    while (!tokens.empty() && !words.full()) {
        const auto match = tokens.find(text, size, from);
        if (!match) break;
        between(text + from, match->start - from);
        words.special(match->id);
        from = match->end;
    }
    if (!words.full()) between(text + from, size - from);
}

}  // namespace

class ByteBpe::Words {
public:
    Words(const ByteBpe& bpe, Scratch& scratch, std::size_t limit)
        : bpe_(bpe), scratch_(scratch), limit_(limit == kNoLimit ? kNoLimit : scratch.tokens.size() + limit) {}
    ~Words() {
        scratch_.long_bytes.drop();
        if (scratch_.bytes.capacity() > kMaxKept) scratch_.bytes = {};
        if (scratch_.normalized.text.capacity() > kMaxKept) scratch_.normalized = {};
    }
    Words(const Words&) = delete;
    Words& operator=(const Words&) = delete;

    bool full() const { return scratch_.tokens.size() >= limit_; }

    void special(std::int32_t token) { scratch_.tokens.push_back(token); }

    // One word, perhaps with a space before it that the text has not.
    template <class Unit>
    void take(const Unit* text, std::size_t size, bool after_space) {
        const std::size_t most = kMaxUtf8 * size + 1;
        if (scratch_.bytes.size() < most) scratch_.bytes.resize(most);
        std::uint8_t* end = scratch_.bytes.data();
        if (after_space) *end++ = ' ';
        for (std::size_t i = 0; i < size; ++i) end = write(text[i], end);
        encode_word(scratch_.bytes.data(), static_cast<std::size_t>(end - scratch_.bytes.data()));
    }

private:
    static constexpr std::size_t kMaxUtf8 = 4, kMaxKept = 1U << 16;  // of a word and of a text, between calls

    static std::uint8_t* write(char32_t c, std::uint8_t* end) {
        if (c < 0x80) {
            *end = static_cast<std::uint8_t>(c);
            return end + 1;
        }
        return reinterpret_cast<std::uint8_t*>(write_utf8(c, reinterpret_cast<char*>(end)));
    }

    void encode_word(const std::uint8_t* word, std::size_t size) {
        if (size > WordCache::kMaxBytes) return encode_unseen(word, size);
        const WordCache::Key key = WordCache::key(word, size);
        if (scratch_.cache.find(key, scratch_.tokens)) return;
        const std::size_t first = scratch_.tokens.size();
        encode_unseen(word, size);
        scratch_.cache.keep(key, scratch_.tokens.data() + first, scratch_.tokens.size() - first);
    }

    void encode_unseen(const std::uint8_t* word, std::size_t size) {
        const std::int32_t whole = bpe_.whole_words_.find(word, size);
        if (whole >= 0) return scratch_.tokens.push_back(whole);
        bpe_.merges_.encode(word, size, scratch_.long_bytes, scratch_.tokens);
    }

    const ByteBpe& bpe_;
    Scratch& scratch_;
    std::size_t limit_;
};

ByteBpe::ByteBpe(ByteBpeOptions options)
    : adds_space_(options.adds_space),
      pattern_(options.pattern),
      merges_(options.merges, tokens_of_bytes(options)),
      whole_words_(whole_words(options)),
      added_tokens_(std::move(options.added_tokens)),
      normalized_tokens_(std::move(options.normalized_tokens)) {
    if (adds_space_ && options.pattern.cl100k) throw std::invalid_argument("bpe: a space before words of cl100k");
    if (options.form_c) form_c_.emplace(*options.form_c);
}

// The pieces that as words come out as one token: all, or those that the merges make.
std::vector<std::pair<std::string, std::int32_t>> ByteBpe::whole_words(const ByteBpeOptions& options) const {
    if (options.ignores_merges) return options.pieces;
    std::vector<std::pair<std::string, std::int32_t>> found;
    ByteMerges::LongWord memory;
    Vector<std::int32_t> tokens;
    for (const auto& [piece, id] : options.pieces) {
        tokens.clear();
        merges_.encode(reinterpret_cast<const std::uint8_t*>(piece.data()), piece.size(), memory, tokens);
        if (tokens.size() == 1 && tokens[0] == id) found.emplace_back(piece, id);
    }
    return found;
}

bool ByteBpe::encode(const Text& text, std::size_t limit, Scratch& scratch) const {
    Words words(*this, scratch, limit);
    visit(text, [&](const auto* units, std::size_t size) {
        cut(added_tokens_, units, size, words, [&](const auto* part, std::size_t part_size) {
            encode_raw(part, part_size, scratch, words);
        });
    });
    return true;
}

template <class Unit>
void ByteBpe::encode_raw(const Unit* text, std::size_t size, Scratch& scratch, Words& words) const {
    if (!form_c_ || form_c_->keeps(text, size)) return encode_normalized(text, size, words);
    form_c_->normalize(text, size, scratch.normalized);
    encode_normalized(scratch.normalized.text.data(), scratch.normalized.text.size(), words);
}

template <class Unit>
void ByteBpe::encode_normalized(const Unit* text, std::size_t size, Words& words) const {
    cut(normalized_tokens_, text, size, words, [&](const auto* part, std::size_t part_size) {
        encode_between(part, part_size, words);
    });
}

template <class Unit>
void ByteBpe::encode_between(const Unit* text, std::size_t size, Words& words) const {
    std::size_t start = 0;
    if (adds_space_ && size > 0 && text[0] != ' ') {
        start = pattern_.end_after_space(text, size);
        words.take(text, start, true);
    }
    while (start < size && !words.full()) {
        const std::size_t end = pattern_.end_of_word(text, size, start);
        words.take(text + start, end - start, false);
        start = end;
    }
}

}  // namespace ivy
