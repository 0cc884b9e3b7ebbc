// A text as Python holds it: code points of one, two or four bytes each. No copy, no UTF-8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace ivy {

struct Text {
    const void* data = nullptr;
    std::size_t size = 0;    // in code points
    unsigned unit_bytes = 1;
};

// Calls `visitor(units, size)` with the units' own type.
template <class Visitor>
decltype(auto) visit(const Text& text, Visitor&& visitor) {
    switch (text.unit_bytes) {
        case 1: return visitor(static_cast<const std::uint8_t*>(text.data), text.size);
        case 2: return visitor(static_cast<const std::uint16_t*>(text.data), text.size);
        default: return visitor(static_cast<const std::uint32_t*>(text.data), text.size);
    }
}

constexpr bool is_surrogate(char32_t c) { return c >= 0xD800 && c < 0xE000; }

// The property White_Space.
constexpr bool is_white_space(char32_t c) {
    return c == ' ' || (c >= 0x09 && c <= 0x0D) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
           c == 0x3000;
}

constexpr unsigned utf8_length(char32_t c) { return c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4; }

// Appends `c` to `out`, which has room for four bytes; returns the end.
inline char* write_utf8(char32_t c, char* out) {
    if (c < 0x80) {
        *out++ = static_cast<char>(c);
        return out;
    }
    const unsigned length = utf8_length(c);
    const unsigned lead = length == 2 ? 0xC0U : length == 3 ? 0xE0U : 0xF0U;
    *out++ = static_cast<char>(lead | (c >> (6 * (length - 1))));
    for (unsigned rest = length - 1; rest-- > 0;) *out++ = static_cast<char>(0x80U | ((c >> (6 * rest)) & 0x3FU));
    return out;
}

// The code points of valid UTF-8.
inline std::u32string decode_utf8(std::string_view utf8) {
    std::u32string decoded;
    for (std::size_t i = 0; i < utf8.size();) {
        const auto lead = static_cast<unsigned char>(utf8[i]);
        const unsigned length = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
        char32_t c = length == 1 ? lead : lead & (0x7FU >> length);
        for (unsigned k = 1; k < length && i + k < utf8.size(); ++k)
            c = c << 6 | (static_cast<unsigned char>(utf8[i + k]) & 0x3FU);
        decoded.push_back(c);
        i += length;
    }
    return decoded;
}

}  // namespace ivy
