// libFuzzer target: any bytes as UTF-8, UCS-2 or UCS-4; the invariants must hold. The model is IVY_FUZZ_MODEL's.
#include <cstdlib>

#include "invariants.hpp"
#include "model_file.hpp"

namespace {

using namespace ivy;

BatchEncoder& encoder() {
    static BatchEncoder* const instance = [] {
        FileReader file(std::getenv("IVY_FUZZ_MODEL"));
        return new BatchEncoder(read_model(file), 1);
    }();
    return *instance;
}

std::u32string characters(const std::uint8_t* data, std::size_t size) {
    switch (data[0] % 3) {
        case 0: return decode_utf8({reinterpret_cast<const char*>(data), size});
        case 1: {
            std::u32string text;
            for (std::size_t i = 1; i + 1 < size; i += 2) text.push_back(data[i] | static_cast<char32_t>(data[i + 1]) << 8);
            return text;
        }
        default: return {data, data + size};
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size < 2) return 0;
    std::u32string text = characters(data, size);
    for (char32_t& c : text)
        if (c >= 0x110000) c %= 0x110000;  // what no Python string holds
    std::vector<std::int32_t> ids;
    check_text(encoder(), text, data[1] % 17U, ids);
    return 0;
}
