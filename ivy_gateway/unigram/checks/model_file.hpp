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

inline std::unique_ptr<Model> read_model(FileReader& file) {
    return file.number<std::uint8_t>() == 0 ? read_unigram(file) : read_wordpiece(file);
}

}  // namespace ivy
