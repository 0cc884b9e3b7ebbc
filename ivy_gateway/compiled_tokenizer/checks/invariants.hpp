// What holds for every text, whatever its ids: used with known ids and without.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "batch.hpp"

namespace ivy {

inline void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "does not hold: %s\n", what);
    std::abort();
}

// The ids of one text in a frame, and whether the encoder could encode it.
inline bool ids_of(BatchEncoder& encoder, const Text& text, const Frame& frame, std::vector<std::int32_t>& ids) {
    std::unique_ptr<Batch> batch = encoder.lend_batch();
    Item item;
    item.text = text;
    item.frame = &frame;
    batch->items.push_back(item);
    batch->run();
    const bool encoded = batch->items[0].state <= Item::State::Cut;
    ids.resize(encoded ? batch->items[0].num_tokens() : 0);
    if (encoded) batch->write(ids.data(), nullptr);
    encoder.give_back(std::move(batch));
    return encoded;
}

// A text encodes the same from units of any width, again, and cut early; returns whether it was encoded.
inline bool check_text(BatchEncoder& encoder, const std::u32string& text, std::size_t room,
                       std::vector<std::int32_t>& ids) {
    const Text wide{text.data(), text.size(), 4};
    const Frame whole;
    if (!ids_of(encoder, wide, whole, ids)) return false;
    std::vector<std::int32_t> other;
    require(ids_of(encoder, wide, whole, other) && other == ids, "the same ids again, now from the cache");
    bool narrow = true;
    for (const char32_t c : text) narrow &= c < 0x10000;
    if (narrow) {
        const std::u16string units(text.begin(), text.end());
        require(ids_of(encoder, {units.data(), units.size(), 2}, whole, other) && other == ids, "the same ids from UCS-2");
    }
    Frame frame;
    frame.prefix = {{7, 8}, {0, 0}};
    frame.room = room;
    std::vector<std::int32_t> expected{7, 8};
    expected.insert(expected.end(), ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(std::min(room, ids.size())));
    require(!ids_of(encoder, wide, frame, other) || other == expected, "a cut text has the first ids of the whole");
    frame.keeps_end = true;
    expected.resize(2);
    expected.insert(expected.end(), ids.end() - static_cast<std::ptrdiff_t>(std::min(room, ids.size())), ids.end());
    require(ids_of(encoder, wide, frame, other) && other == expected, "or the last ones");
    return true;
}

}  // namespace ivy
