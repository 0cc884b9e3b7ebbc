// Words that are one token: found by their bytes in one step.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "memory.hpp"

namespace ivy {

class WholeWords {
public:
    // Throws std::length_error for words of 4 GiB in all.
    explicit WholeWords(const std::vector<std::pair<std::string, std::int32_t>>& words);

    // The token of `word`, or -1.
    std::int32_t find(const std::uint8_t* word, std::size_t size) const;

private:
    struct Slot {
        std::uint32_t hash = 0, end = 0;  // and where its head ends; 0: empty
    };
    struct Head {  // stands before a word's bytes, all in one place
        std::int32_t token;
        std::uint32_t size;
    };

    Vector<Slot> slots_;  // open addressing
    Vector<std::uint8_t> words_;
};

}  // namespace ivy
