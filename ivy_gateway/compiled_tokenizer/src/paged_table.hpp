// A value for each code point, in pages of 256 of which equal ones are stored once.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace ivy {

template <class Value>
class PagedTable {
public:
    // `value_of` is asked once for each code point, in order.
    template <class ValueOf>
    explicit PagedTable(const ValueOf& value_of) : pages_(kNumPages) {
        std::map<std::string, std::uint16_t> known;
        for (std::size_t page = 0; page < kNumPages; ++page) {
            Value values[kPage];
            for (std::size_t i = 0; i < kPage; ++i) values[i] = value_of(static_cast<char32_t>(page * kPage + i));
            std::string key(sizeof values, '\0');
            std::memcpy(key.data(), values, sizeof values);
            const auto [place, is_new] = known.emplace(key, static_cast<std::uint16_t>(known.size()));
            if (is_new) values_.insert(values_.end(), values, values + kPage);
            pages_[page] = place->second;
        }
    }

    Value operator[](char32_t c) const { return values_[std::size_t{pages_[c >> 8]} << 8 | (c & 0xFFU)]; }

private:
    static constexpr std::size_t kPage = 256, kNumPages = 0x110000 / kPage;

    std::vector<std::uint16_t> pages_;
    std::vector<Value> values_;
};

}  // namespace ivy
