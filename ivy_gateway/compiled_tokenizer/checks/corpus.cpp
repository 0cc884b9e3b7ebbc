// Encodes a corpus with known ids: corpus MODEL CORPUS. Built with sanitizers; exit status 0 if all is equal and
// a second pass over everything, in one batch on several threads, allocates nothing.
#include <sanitizer/allocator_interface.h>

#include <cstdio>

#include "invariants.hpp"
#include "model_file.hpp"

namespace {

using namespace ivy;

std::atomic<std::uint64_t> num_mallocs{0};

void count_malloc(const volatile void*, std::size_t) { num_mallocs.fetch_add(1, std::memory_order_relaxed); }
void ignore_free(const volatile void*) {}

struct Case {
    std::u32string text;
    std::vector<std::int32_t> ids;
};

std::vector<Case> read_cases(const char* path) {
    FileReader file(path);
    std::vector<Case> cases;
    while (!file.at_end()) {
        Case one;
        one.text = file.characters();
        one.ids.resize(file.number<std::uint32_t>());
        for (std::int32_t& id : one.ids) id = file.number<std::int32_t>();
        cases.push_back(std::move(one));
    }
    return cases;
}

// Everything in one batch: ids as known, and how often memory was asked for meanwhile.
std::uint64_t encode_all(BatchEncoder& encoder, const std::vector<Case>& cases, const Frame& frame) {
    const std::uint64_t before = num_mallocs;
    std::unique_ptr<Batch> batch = encoder.lend_batch();
    for (const Case& one : cases) {
        Item item;
        item.text = {one.text.data(), one.text.size(), 4};
        item.frame = &frame;
        batch->items.push_back(item);
    }
    batch->run();
    for (std::size_t i = 0; i < cases.size(); ++i) {
        const Item& item = batch->items[i];
        if (item.state == Item::State::NotEncoded) continue;
        require(item.count == cases[i].ids.size() &&
                    std::equal(cases[i].ids.begin(), cases[i].ids.end(), item.owner->tokens.data() + item.first),
                "the known ids, in a batch");
    }
    encoder.give_back(std::move(batch));
    return num_mallocs - before;
}

}  // namespace

int main(int, char** arguments) {
    __sanitizer_install_malloc_and_free_hooks(count_malloc, ignore_free);
    FileReader model(arguments[1]);
    BatchEncoder encoder(read_model(model), 2);
    const std::vector<Case> cases = read_cases(arguments[2]);
    std::size_t num_left = 0;
    std::vector<std::int32_t> ids;
    for (const Case& one : cases) {
        const bool encoded = check_text(encoder, one.text, one.text.size() % 13, ids);
        num_left += !encoded;
        require(!encoded || ids == one.ids, "the known ids");
    }
    const Frame frame;
    std::uint64_t allocations = 1;
    // Which thread meets which text is chance: after some rounds every scratch has met the largest.
    for (int round = 0; round < 50 && allocations != 0; ++round) allocations = encode_all(encoder, cases, frame);
    require(allocations == 0, "a steady state without allocations");
    std::printf("%zu texts, %zu left to the library, no allocation in the last pass\n", cases.size(), num_left);
    return 0;
}
