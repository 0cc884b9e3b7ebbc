// The `precompiled_charsmap` of sentencepiece: a Darts-clone double array of keys, and their replacements.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ivy {

class Charsmap {
public:
    Charsmap() = default;  // replaces nothing

    // Throws std::invalid_argument for a blob that is cut or points outside itself.
    explicit Charsmap(std::string_view blob);

    // What replaces the shortest key that `text` starts with, or nothing.
    std::optional<std::string_view> replacement(std::string_view text) const;

private:
    std::vector<std::uint32_t> units_;
    std::string replacements_;  // each ended by a zero byte
};

}  // namespace ivy
