// The extension module: `Encoder` over Python strings and numpy arrays. The GIL is let go while it encodes.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "batch.hpp"
#include "byte_bpe.hpp"
#include "graphemes.hpp"
#include "unigram.hpp"
#include "wordpiece.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ivy {
namespace {

using Ids = nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>;
using IdsIn = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Text text_of(nb::handle object) {
    if (!PyUnicode_Check(object.ptr())) throw nb::type_error("a text must be a str");
    return {PyUnicode_DATA(object.ptr()), static_cast<std::size_t>(PyUnicode_GET_LENGTH(object.ptr())),
            static_cast<unsigned>(PyUnicode_KIND(object.ptr()))};
}

std::u32string characters_of(nb::handle object) {
    const Text text = text_of(object);
    return visit(text, [](const auto* units, std::size_t size) { return std::u32string(units, units + size); });
}

template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> new_array(std::size_t size) {
    T* const data = new T[size];
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {size}, owner);
}

std::vector<std::int32_t> copy_of(const IdsIn& ids) { return {ids.data(), ids.data() + ids.shape(0)}; }

Frame::Side side_of(const IdsIn& ids, const IdsIn& segments) {
    if (ids.shape(0) != segments.shape(0)) throw std::invalid_argument("a segment for each id");
    return {copy_of(ids), copy_of(segments)};
}

// A batch that goes back however the call ends.
class LentBatch {
public:
    explicit LentBatch(BatchEncoder& encoder) : encoder_(encoder), batch_(encoder.lend_batch()) {}
    ~LentBatch() { encoder_.give_back(std::move(batch_)); }
    LentBatch(const LentBatch&) = delete;
    LentBatch& operator=(const LentBatch&) = delete;
    Batch* operator->() { return batch_.get(); }

private:
    BatchEncoder& encoder_;
    std::unique_ptr<Batch> batch_;
};

void fill(Batch& batch, const nb::list& texts, const nb::list& frames, const IdsIn* frame_of) {
    const std::size_t size = nb::len(texts);
    const std::size_t num_frames = nb::len(frames);
    if (frame_of != nullptr && frame_of->shape(0) != size) throw std::invalid_argument("a frame for each text");
    for (std::size_t i = 0; i < size; ++i) {
        const std::size_t frame = frame_of == nullptr ? 0 : static_cast<std::size_t>(frame_of->data()[i]);
        if (frame >= num_frames) throw std::invalid_argument("no such frame");
        Item item;
        item.text = text_of(texts[i]);
        item.frame = nb::cast<const Frame*>(frames[frame]);
        batch.items.push_back(item);
    }
}

// ids int32 [T], segments int32 [T] or None, cu_seqlens int32 [B + 1], states uint8 [B].
nb::tuple encode(BatchEncoder& encoder, const nb::list& texts, const nb::list& frames,
                 std::optional<IdsIn> frame_of, bool with_segments) {
    LentBatch batch(encoder);
    fill(*batch.operator->(), texts, frames, frame_of ? &*frame_of : nullptr);
    {
        nb::gil_scoped_release release;
        batch->run();
    }
    const std::size_t size = batch->items.size();
    auto ends = new_array<std::int32_t>(size + 1);
    auto states = new_array<std::uint8_t>(size);
    std::size_t total = ends.data()[0] = 0;
    for (std::size_t i = 0; i < size; ++i) {
        total += batch->items[i].num_tokens();
        if (total > INT32_MAX) throw std::length_error("more than 2^31 tokens in one batch");
        ends.data()[i + 1] = static_cast<std::int32_t>(total);
        states.data()[i] = static_cast<std::uint8_t>(batch->items[i].state);
    }
    auto ids = new_array<std::int32_t>(total);
    if (!with_segments) {
        batch->write(ids.data(), nullptr);
        return nb::make_tuple(ids, nb::none(), ends, states);
    }
    auto segments = new_array<std::int32_t>(total);
    batch->write(ids.data(), segments.data());
    return nb::make_tuple(ids, segments, ends, states);
}

std::vector<AddedToken> added_tokens_of(const nb::list& tokens) {
    std::vector<AddedToken> added;
    for (nb::handle token : tokens) {
        const auto fields = nb::cast<nb::tuple>(token);
        added.push_back({characters_of(fields[0]), nb::cast<std::int32_t>(fields[1]), nb::cast<bool>(fields[2]),
                         nb::cast<bool>(fields[3])});
    }
    return added;
}

std::vector<std::u32string> pieces_of(const nb::list& pieces) {
    std::vector<std::u32string> converted;
    for (nb::handle piece : pieces) converted.push_back(characters_of(piece));
    return converted;
}

BatchEncoder* new_unigram(const nb::list& pieces, std::vector<double> scores, std::int32_t unknown_token,
                          const nb::bytes& charsmap, bool splits_white_space, bool collapses_spaces,
                          const nb::list& added_tokens, unsigned num_threads) {
    UnigramOptions options;
    options.pieces = pieces_of(pieces);
    options.scores = std::move(scores);
    options.unknown_token = unknown_token;
    options.charsmap.assign(charsmap.c_str(), charsmap.size());
    options.splits_white_space = splits_white_space;
    options.collapses_spaces = collapses_spaces;
    options.added_tokens = added_tokens_of(added_tokens);
    return new BatchEncoder(std::make_unique<Unigram>(std::move(options)), num_threads);
}

BatchEncoder* new_wordpiece(const nb::list& pieces, nb::handle continuing_prefix, std::int32_t unknown_token,
                            std::size_t max_characters, const nb::list& normalized,
                            std::vector<std::pair<std::uint32_t, std::uint32_t>> removed, nb::handle isolated,
                            nb::handle punctuation, nb::handle reordering, const nb::list& added_tokens,
                            unsigned num_threads) {
    WordPieceOptions options;
    for (nb::handle item : pieces) {
        const auto piece = nb::cast<nb::tuple>(item);
        options.pieces.emplace_back(characters_of(piece[0]), nb::cast<std::int32_t>(piece[1]));
    }
    for (nb::handle item : normalized) {
        const auto change = nb::cast<nb::tuple>(item);
        options.normalized.emplace_back(characters_of(change[0]).at(0), characters_of(change[1]));
    }
    options.continuing_prefix = characters_of(continuing_prefix);
    options.unknown_token = unknown_token;
    options.max_characters = max_characters;
    options.removed.assign(removed.begin(), removed.end());
    options.isolated = characters_of(isolated);
    options.punctuation = characters_of(punctuation);
    options.reordering = characters_of(reordering);
    options.added_tokens = added_tokens_of(added_tokens);
    return new BatchEncoder(std::make_unique<WordPiece>(std::move(options)), num_threads);
}

using Pairs = std::vector<std::pair<std::uint32_t, std::uint32_t>>;

template <class Second>
std::vector<std::pair<char32_t, Second>> code_points_of(const Pairs& pairs) {
    std::vector<std::pair<char32_t, Second>> converted;
    for (const auto& [first, second] : pairs) converted.emplace_back(first, static_cast<Second>(second));
    return converted;
}

// Parts, marks and pairs, as `code_points.form_c` gives them.
FormCOptions form_c_of(const nb::tuple& tables) {
    FormCOptions options;
    for (nb::handle item : nb::cast<nb::list>(tables[0]))
        options.parts.emplace_back(nb::cast<std::uint32_t>(item[0]), characters_of(item[1]));
    options.marks = code_points_of<std::uint8_t>(nb::cast<Pairs>(tables[1]));
    for (nb::handle item : nb::cast<nb::list>(tables[2]))
        options.pairs.push_back({nb::cast<std::uint32_t>(item[0]), nb::cast<std::uint32_t>(item[1]),
                                 nb::cast<std::uint32_t>(item[2])});
    return options;
}

using MergesIn = nb::ndarray<const std::int32_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;

BatchEncoder* new_byte_bpe(const nb::list& pieces, const MergesIn& merges, bool ignores_merges, bool adds_space,
                           bool cl100k, std::size_t max_digits, const Pairs& letters, const Pairs& numbers,
                           const Pairs& white_space, const std::optional<nb::tuple>& form_c,
                           const nb::list& added_tokens, const nb::list& normalized_tokens, unsigned num_threads) {
    ByteBpeOptions options;
    for (nb::handle item : pieces) {
        const auto piece = nb::cast<nb::tuple>(item);
        const auto bytes = nb::cast<nb::bytes>(piece[0]);
        options.pieces.emplace_back(std::string(bytes.c_str(), bytes.size()), nb::cast<std::int32_t>(piece[1]));
    }
    for (std::size_t i = 0; i < merges.shape(0); ++i) {
        const std::int32_t* const rule = merges.data() + 3 * i;
        options.merges.push_back({rule[0], rule[1], rule[2]});
    }
    options.ignores_merges = ignores_merges;
    options.adds_space = adds_space;
    options.pattern = {code_points_of<char32_t>(letters), code_points_of<char32_t>(numbers),
                       code_points_of<char32_t>(white_space), cl100k, max_digits};
    if (form_c) options.form_c = form_c_of(*form_c);
    options.added_tokens = added_tokens_of(added_tokens);
    options.normalized_tokens = added_tokens_of(normalized_tokens);
    return new BatchEncoder(std::make_unique<ByteBpe>(std::move(options)), num_threads);
}

nb::list ranges() {
    nb::list found;
    for (const GraphemeRange& range : grapheme_ranges())
        found.append(nb::make_tuple(static_cast<std::uint32_t>(range.first), static_cast<std::uint32_t>(range.last),
                                    name_of(range.kind), name_of(range.conjunct)));
    return found;
}

}  // namespace
}  // namespace ivy

NB_MODULE(_native, module) {
    using namespace ivy;
    nb::set_leak_warnings(false);  // what a traceback still holds when the interpreter ends is no leak

    nb::class_<Frame>(module, "Frame")
        .def(
            "__init__",
            [](Frame* self, const IdsIn& prefix, const IdsIn& suffix, const IdsIn& prefix_segments,
               const IdsIn& suffix_segments, std::int32_t text_segment, std::optional<std::size_t> room,
               bool keeps_end) {
                new (self) Frame{side_of(prefix, prefix_segments), side_of(suffix, suffix_segments), text_segment,
                                 room.value_or(Model::kNoLimit), keeps_end};
            },
            "prefix"_a, "suffix"_a, "prefix_segments"_a, "suffix_segments"_a, "text_segment"_a = 0,
            "room"_a = nb::none(), "keeps_end"_a = false);

    nb::class_<BatchEncoder>(module, "Encoder")
        .def("encode", &encode, "texts"_a, "frames"_a, "frame_of"_a = nb::none(), "with_segments"_a = false);

    module.def("unigram", &new_unigram, "pieces"_a, "scores"_a, "unknown_token"_a, "charsmap"_a,
               "splits_white_space"_a, "collapses_spaces"_a, "added_tokens"_a, "num_threads"_a);
    module.def("wordpiece", &new_wordpiece, "pieces"_a, "continuing_prefix"_a, "unknown_token"_a,
               "max_characters"_a, "normalized"_a, "removed"_a, "isolated"_a, "punctuation"_a,
               "reordering"_a, "added_tokens"_a, "num_threads"_a);
    module.def("byte_bpe", &new_byte_bpe, "pieces"_a, "merges"_a, "ignores_merges"_a, "adds_space"_a, "cl100k"_a,
               "max_digits"_a, "letters"_a, "numbers"_a, "white_space"_a, "form_c"_a.none(), "added_tokens"_a,
               "normalized_tokens"_a, "num_threads"_a);
    module.def("grapheme_ranges", &ranges);
    module.def("num_allocations", [] { return num_allocations.load(); });
}
