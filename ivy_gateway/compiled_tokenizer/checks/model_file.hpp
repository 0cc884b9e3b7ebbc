// A tokenizer in a file that needs no Python to read: for the programs that check the encoder by itself.
//
// Little-endian. A string is a count (u32) and its bytes, UTF-8. Written by `tests/ivy_gateway/sanitized.py`.
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "byte_bpe.hpp"
#include "text.hpp"
#include "unigram.hpp"
#include "wordpiece.hpp"

namespace ivy {

class FileReader {
public:
    explicit FileReader(const std::string& path) {
        std::ifstream file(path, std::ios::binary);
        if (!file) throw std::runtime_error("cannot read " + path);
        content_.assign(std::istreambuf_iterator<char>(file), {});
    }

    bool at_end() const { return position_ == content_.size(); }

    template <class T>
    T number() {
        T value;
        std::memcpy(&value, take(sizeof value), sizeof value);
        return value;
    }
    std::string bytes() {
        const auto size = number<std::uint32_t>();
        return {take(size), size};
    }
    std::u32string characters() { return decode_utf8(bytes()); }

private:
    const char* take(std::size_t size) {
        if (size > content_.size() - position_) throw std::runtime_error("the file is cut");
        position_ += size;
        return content_.data() + position_ - size;
    }

    std::string content_;
    std::size_t position_ = 0;
};

inline std::vector<AddedToken> read_added_tokens(FileReader& file) {
    std::vector<AddedToken> tokens(file.number<std::uint32_t>());
    for (AddedToken& token : tokens) {
        token.content = file.characters();
        token.id = file.number<std::int32_t>();
        token.strips_left = file.number<std::uint8_t>() != 0;
        token.strips_right = file.number<std::uint8_t>() != 0;
    }
    return tokens;
}

inline std::unique_ptr<Model> read_unigram(FileReader& file) {
    UnigramOptions options;
    options.unknown_token = file.number<std::int32_t>();
    options.splits_white_space = file.number<std::uint8_t>() != 0;
    options.collapses_spaces = file.number<std::uint8_t>() != 0;
    options.charsmap = file.bytes();
    options.added_tokens = read_added_tokens(file);
    for (auto count = file.number<std::uint32_t>(); count > 0; --count) {
        options.pieces.push_back(file.characters());
        options.scores.push_back(file.number<double>());
    }
    return std::make_unique<Unigram>(std::move(options));
}

inline std::unique_ptr<Model> read_wordpiece(FileReader& file) {
    WordPieceOptions options;
    options.unknown_token = file.number<std::int32_t>();
    options.max_characters = file.number<std::uint32_t>();
    options.continuing_prefix = file.characters();
    options.isolated = file.characters();
    options.punctuation = file.characters();
    options.reordering = file.characters();
    options.added_tokens = read_added_tokens(file);
    for (auto count = file.number<std::uint32_t>(); count > 0; --count) {
        const auto first = file.number<std::uint32_t>();
        options.removed.emplace_back(first, file.number<std::uint32_t>());
    }
    for (auto count = file.number<std::uint32_t>(); count > 0; --count) {
        const auto character = file.number<std::uint32_t>();
        options.normalized.emplace_back(character, file.characters());
    }
    for (auto count = file.number<std::uint32_t>(); count > 0; --count) {
        std::u32string piece = file.characters();
        options.pieces.emplace_back(std::move(piece), file.number<std::int32_t>());
    }
    return std::make_unique<WordPiece>(std::move(options));
}

inline CodePointRanges read_ranges(FileReader& file) {
    CodePointRanges ranges(file.number<std::uint32_t>());
    for (auto& [first, last] : ranges) {
        first = file.number<std::uint32_t>();
        last = file.number<std::uint32_t>();
    }
    return ranges;
}

inline FormCOptions read_form_c(FileReader& file) {
    FormCOptions options;
    for (auto count = file.number<std::uint32_t>(); count > 0; --count) {
        const auto character = file.number<std::uint32_t>();
        options.parts.emplace_back(character, file.characters());
    }
    for (auto count = file.number<std::uint32_t>(); count > 0; --count) {
        const auto mark = file.number<std::uint32_t>();
        options.marks.emplace_back(mark, file.number<std::uint8_t>());
    }
    options.pairs.resize(file.number<std::uint32_t>());
    for (auto& [first, second, joined] : options.pairs)
        for (char32_t* const part : {&first, &second, &joined}) *part = file.number<std::uint32_t>();
    return options;
}

inline std::unique_ptr<Model> read_byte_bpe(FileReader& file) {
    ByteBpeOptions options;
    options.ignores_merges = file.number<std::uint8_t>() != 0;
    options.adds_space = file.number<std::uint8_t>() != 0;
    options.pattern.cl100k = file.number<std::uint8_t>() != 0;
    options.pattern.max_digits = file.number<std::uint32_t>();
    options.pattern.letters = read_ranges(file);
    options.pattern.numbers = read_ranges(file);
    options.pattern.white_space = read_ranges(file);
    if (file.number<std::uint8_t>() != 0) options.form_c = read_form_c(file);
    options.added_tokens = read_added_tokens(file);
    options.normalized_tokens = read_added_tokens(file);
    options.merges.resize(file.number<std::uint32_t>());
    for (auto& [left, right, merged] : options.merges)
        for (std::int32_t* const token : {&left, &right, &merged}) *token = file.number<std::int32_t>();
    for (auto count = file.number<std::uint32_t>(); count > 0; --count) {
        std::string piece = file.bytes();
        options.pieces.emplace_back(std::move(piece), file.number<std::int32_t>());
    }
    return std::make_unique<ByteBpe>(std::move(options));
}

inline std::unique_ptr<Model> read_model(FileReader& file) {
    switch (file.number<std::uint8_t>()) {
        case 0: return read_unigram(file);
        case 1: return read_wordpiece(file);
        default: return read_byte_bpe(file);
    }
}

}  // namespace ivy
