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
    explicit WholeWords(const std::vector<std::pair<std::string, std::int32_t>>& words);

    // The token of `word`, or -1.
    std::int32_t find(const std::uint8_t* word, std::size_t size) const;

private:
    struct Slot {
        std::uint32_t hash = 0, index_plus_1 = 0;  // 0: empty
    };

    Vector<Slot> slots_;  // open addressing
    Vector<std::uint8_t> bytes_;
    Vector<std::uint32_t> starts_;  // of each word, and the end of the last
    Vector<std::int32_t> tokens_;
};

}  // namespace ivy
