// Containers whose allocations are counted, so that a test can see that encoding does without them. Large
// ones ask for huge pages: a trie is read all over, and the page table is what misses first.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

namespace ivy {

inline std::atomic<std::uint64_t> num_allocations{0};

inline constexpr std::size_t kHugePage = 2U << 20;

inline void* allocate_bytes(std::size_t size) {
    if (size < kHugePage) return ::operator new(size);
    void* const data = ::operator new(size, std::align_val_t{kHugePage});
#ifdef MADV_HUGEPAGE
    madvise(data, size, MADV_HUGEPAGE);  // a wish: without it everything works as well
#endif
    return data;
}

inline void deallocate_bytes(void* data, std::size_t size) noexcept {
    if (size < kHugePage) return ::operator delete(data);
    ::operator delete(data, std::align_val_t{kHugePage});
}

template <class T>
struct CountedAllocator {
    using value_type = T;

    CountedAllocator() = default;
    template <class U>
    CountedAllocator(const CountedAllocator<U>&) noexcept {}

    T* allocate(std::size_t count) {
        num_allocations.fetch_add(1, std::memory_order_relaxed);
        return static_cast<T*>(allocate_bytes(count * sizeof(T)));
    }
    void deallocate(T* data, std::size_t count) noexcept { deallocate_bytes(data, count * sizeof(T)); }

    bool operator==(const CountedAllocator&) const { return true; }
    bool operator!=(const CountedAllocator&) const { return false; }
};

template <class T>
using Vector = std::vector<T, CountedAllocator<T>>;

}  // namespace ivy
