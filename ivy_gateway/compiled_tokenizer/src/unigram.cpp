#include "unigram.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace ivy {
namespace {

constexpr double kUnknownPenalty = 10.0;  // sentencepiece, unigram_model.cc: kUnkPenalty
constexpr std::size_t kMaxCluster = 5;    // bytes: longer clusters are normalized character by character
constexpr std::size_t kMaxPiece = 65'000;

UnigramModel build_model(const UnigramOptions& options, const Alphabet& alphabet) {
    if (options.pieces.size() != options.scores.size()) throw std::invalid_argument("unigram: a score for each piece");
    UnigramModel model;
    std::vector<Trie::Key> keys;
    for (std::size_t id = 0; id < options.pieces.size(); ++id) {
        keys.push_back({alphabet.encode(options.pieces[id]), static_cast<std::int32_t>(id)});
        model.max_piece = std::max(model.max_piece, options.pieces[id].size());
    }
    if (model.max_piece > kMaxPiece) throw std::length_error("unigram: a piece is too long");
    model.trie = Trie(std::move(keys), alphabet.size());
    model.scores.assign(options.scores.begin(), options.scores.end());
    model.unknown_token = options.unknown_token;
    double lowest = std::numeric_limits<double>::infinity();
    for (const double score : options.scores) lowest = std::min(lowest, score);
    model.unknown_score = lowest - kUnknownPenalty;
    return model;
}

}  // namespace

// Takes normalized characters and encodes each word as it ends. Every word starts with the meta symbol.
class Unigram::Words {
public:
    Words(const Unigram& unigram, Scratch& scratch, std::size_t limit)
        : unigram_(unigram),
          scratch_(scratch),
          word_(scratch.word.data()),
          limit_(limit == kNoLimit ? kNoLimit : scratch.tokens.size() + limit) {
        word_[0] = Alphabet::kMeta;
    }
    ~Words() { scratch_.long_word.drop(); }
    Words(const Words&) = delete;
    Words& operator=(const Words&) = delete;

    bool full() const { return scratch_.tokens.size() >= limit_; }

    // False once there are enough tokens.
    bool take(Entry entry) {
        if (entry.is_push()) {
            after_space_ = false;
            return push(entry.code());
        }
        take_rare(entry);
        return !full();
    }

    // The end of a stretch of text: nothing of it joins what follows.
    void end() {
        end_word();
        after_space_ = false;
    }

    void special(std::int32_t token) { scratch_.tokens.push_back(token); }

private:
    void take_rare(Entry entry) {
        switch (entry.action()) {
            case Action::Replace: take_all(entry.replacement()); return;
            case Action::End: end_word(); return;
            case Action::Space:
                if (after_space_ && unigram_.collapses_spaces_) return;
                start_word();
                after_space_ = true;
                return;
            default: start_word(); after_space_ = false;
        }
    }

    void take_all(std::uint16_t replacement) {
        const Entry* const end = unigram_.replacements_.end(replacement);
        for (const Entry* part = unigram_.replacements_.begin(replacement); part != end; ++part) take(*part);
    }

    bool push(Code code) {
        const bool spills = size_ == ShortWord::kMaxWord;
        if (spills) spill();
        size_ += size_ == 0;
        word_[size_++] = code;
        return !spills || !full();
    }

    void start_word() {
        end_word();
        size_ = 1;
    }

    void end_word() {
        if (size_ == 0) return;
        std::memset(word_ + size_, 0, Scratch::kSlack * sizeof(Code));
        encode_word();
        word_[0] = Alphabet::kMeta;
        size_ = 0;
    }

    void encode_word() {
        if (scratch_.long_word.open()) {
            scratch_.long_word.append(unigram_.model_, word_, size_, scratch_.tokens);
            scratch_.long_word.finish(unigram_.model_, scratch_.tokens);
        } else if (size_ - 1 <= WordCache::kMaxCodes) {
            encode_cached();
        } else {
            scratch_.short_word.encode(unigram_.model_, word_, size_, scratch_.tokens);
        }
    }

    void encode_cached() {
        const WordCache::Key key = WordCache::key(word_ + 1, size_ - 1);
        if (scratch_.cache.find(key, scratch_.tokens)) return;
        const std::size_t first = scratch_.tokens.size();
        scratch_.short_word.encode(unigram_.model_, word_, size_, scratch_.tokens);
        scratch_.cache.keep(key, scratch_.tokens.data() + first, scratch_.tokens.size() - first);
    }

    // The word outgrows the buffer: all but its last character goes to where long words are encoded.
    void spill() {
        scratch_.long_word.append(unigram_.model_, word_, size_ - 1, scratch_.tokens);
        word_[0] = word_[size_ - 1];
        size_ = 1;
    }

    const Unigram& unigram_;
    Scratch& scratch_;
    Code* word_;
    std::size_t limit_;
    std::size_t size_ = 0;  // of the word in the buffer, meta symbol included; 0: none has begun
    bool after_space_ = false;
};

Unigram::Properties::Properties() {
    for (const auto& [kind, conjunct] : grapheme_properties()) {
        kinds.push_back(kind);
        conjuncts.push_back(conjunct);
    }
}

Unigram::Unigram(UnigramOptions options)
    : splits_white_space_(options.splits_white_space),
      collapses_spaces_(options.collapses_spaces),
      charsmap_(options.charsmap.empty() ? Charsmap() : Charsmap(options.charsmap)),
      alphabet_(options.pieces),
      table_([this](char32_t c) { return entry_of(c); }),
      model_(build_model(options, alphabet_)),
      added_tokens_(std::move(options.added_tokens)) {}

Entry Unigram::entry_of(char32_t c) {
    char utf8[4];
    const std::string_view spelled(utf8, static_cast<std::size_t>(write_utf8(c, utf8) - utf8));
    const auto replacement = is_surrogate(c) ? std::nullopt : charsmap_.replacement(spelled);
    const Entry entry = !replacement ? plain_entry(c)
                                     : Entry(Action::Replace, replacements_.add(plain_entries(*replacement)));
    return entry.with_cluster(c, kind(c));
}

// What a character of normalized text does.
Entry Unigram::plain_entry(char32_t c) const {
    if (splits_white_space_ && is_white_space(c)) return {Action::End, 0};
    if (c == ' ') return {Action::Space, 0};
    if (c == Alphabet::kMetaSymbol) return {Action::Start, 0};
    return {Action::Push, alphabet_.code(c)};
}

std::vector<Entry> Unigram::plain_entries(std::string_view utf8) const {
    std::vector<Entry> entries;
    for (const char32_t c : decode_utf8(utf8)) entries.push_back(plain_entry(c));
    return entries;
}

bool Unigram::encode(const Text& text, std::size_t limit, Scratch& scratch) const {
    Words words(*this, scratch, limit);
    visit(text, [&](const auto* units, std::size_t size) { encode_units(units, size, words); });
    return true;
}

template <class Unit>
void Unigram::encode_units(const Unit* text, std::size_t size, Words& words) const {
    std::size_t from = 0;
    while (!added_tokens_.empty() && !words.full()) {
        const auto match = added_tokens_.find(text, size, from);
        if (!match) break;
        encode_between(text + from, match->start - from, words);
        words.special(match->id);
        from = match->end;
    }
    if (!words.full()) encode_between(text + from, size - from, words);
}

template <class Unit>
void Unigram::encode_between(const Unit* text, std::size_t size, Words& words) const {
    if (size == 0) return;
    Entry next = table_[text[0]];
    for (std::size_t i = 0; i < size;) {
        const Entry entry = next;
        std::size_t end = i + 1;
        if (end < size) {
            next = table_[text[end]];
            if (entry.may_join(next) && (end = replace_cluster(text, size, i, words)) != i) {
                i = end;
                if (i < size) next = table_[text[i]];
                continue;
            }
        }
        if (!words.take(entry)) return;
        ++i;
    }
    words.end();
}

// Takes what stands for the short cluster of several characters at `start` and returns its end; or `start`,
// if none is there or nothing stands for it.
template <class Unit>
std::size_t Unigram::replace_cluster(const Unit* text, std::size_t size, std::size_t start, Words& words) const {
    if (!starts_cluster(text, start)) return start;
    char utf8[2 * kMaxCluster];
    char* written = write_utf8(text[start], utf8);
    std::size_t end = start + 1;
    for (; end < size && joins_any(kind(text[end - 1]), kind(text[end])); ++end) {
        if (static_cast<std::size_t>(written - utf8) + utf8_length(text[end]) > kMaxCluster) return start;
        written = write_utf8(text[end], written);
    }
    if (end == start + 1) return start;
    const auto replacement = charsmap_.replacement({utf8, static_cast<std::size_t>(written - utf8)});
    if (!replacement) return start;
    for (const char32_t c : decode_utf8(*replacement)) words.take(plain_entry(c));
    return end;
}

// Whether no cluster reaches from before `position` over it.
template <class Unit>
bool Unigram::starts_cluster(const Unit* text, std::size_t position) const {
    if (position == 0) return true;
    const char32_t c = text[position];
    const Break before = kind(text[position - 1]);
    if (joins_any(before, kind(c)) || joins_hangul(before, kind(c))) return false;
    std::size_t i = position;
    if (kind(c) == Break::Pictographic && before == Break::ZWJ) {  // GB11
        for (--i; i > 0 && kind(text[i - 1]) == Break::Extend;) --i;
        return i == 0 || kind(text[i - 1]) != Break::Pictographic;
    }
    if (properties_.conjuncts[c] != Conjunct::Consonant) return true;
    bool linked = false;  // GB9c
    for (; i > 0; --i) {
        const Conjunct conjunct = properties_.conjuncts[text[i - 1]];
        if (conjunct != Conjunct::Linker && conjunct != Conjunct::Extend)
            return !linked || conjunct != Conjunct::Consonant;
        linked |= conjunct == Conjunct::Linker;
    }
    return true;
}

}  // namespace ivy
