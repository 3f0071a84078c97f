/*
cuda_on_cpu.h: enough of CUDA's vocabulary to compile kernels.cu with a C++ compiler and run it, unchanged, on a CPU.

Every CUDA thread of a block is a real thread, __syncthreads and the warp's exchanges are real barriers, and up to `at_once`
blocks run side by side, in the order of their number. So what is a race on a GPU is one here, and ThreadSanitizer can see it;
shared memory is an exact allocation, so AddressSanitizer sees its ends; and it begins as garbage, as on a GPU.

What a GPU does and this does not: threads of a warp need not be in step here (they are only where they exchange, which is all
that CUDA promises as well); exp2f is the C library's; time means nothing.

Memory order is modelled as CUDA has it: atomics order nothing but themselves, __threadfence() does. ThreadSanitizer does not know
fences, so a fence here acquires from every address that its thread has used atomically since the last one, and makes the
thread's next atomics, up to a barrier, release. A forgotten __threadfence() is then a data race that it reports. Two things
are stricter on a GPU and are not seen: __syncwarp, since an exchange orders memory here, and a second fence after the first
before the same barrier.
*/
#pragma once
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(...)

struct dim3 { unsigned x; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
typedef int cudaStream_t;
inline thread_local dim3 threadIdx, blockIdx, blockDim;

inline int min(int a, int b) { return a < b ? a : b; }
inline float __uint_as_float(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
inline void __nanosleep(unsigned) { std::this_thread::yield(); }

namespace cpu {

inline int at_once = 3;  // blocks that run side by side

// std::barrier spins before it sleeps, which is no way to wait for the other 63 threads of a block on two cores.
class Barrier {
    std::mutex mutex;
    std::condition_variable turn_over;
    int threads, arrived = 0, turn = 0;

    void arrive(std::unique_lock<std::mutex>& lock, bool wait) {
        if (threads > 0 && arrived == threads) {
            arrived = 0, turn++;
            lock.unlock();
            turn_over.notify_all();
        } else if (wait) {
            turn_over.wait(lock, [this, mine = turn] { return turn != mine; });
        }
    }

public:
    explicit Barrier(int threads) : threads(threads) {}
    void arrive_and_wait() {
        std::unique_lock lock(mutex);
        arrived++, arrive(lock, true);
    }
    void arrive_and_drop() {  // a thread that has returned is not waited for any more
        std::unique_lock lock(mutex);
        threads--, arrive(lock, false);
    }
};

struct Warp {
    Barrier barrier;
    uint64_t slot[2][32];  // what each thread offers, in turns: one barrier per exchange is then enough
    explicit Warp(int threads) : barrier(threads) {}
};

struct Block {
    Barrier barrier;
    std::vector<std::unique_ptr<Warp>> warps;
    std::unique_ptr<char[]> memory;  // shared memory, of the size that the kernel asks for
    std::once_flag allocated;
    explicit Block(int threads) : barrier(threads) {
        for (int i = 0; i < threads; i += 32) warps.push_back(std::make_unique<Warp>(min(32, threads - i)));
    }
    void* shared(size_t bytes) {
        std::call_once(allocated, [&] { memory.reset(new char[bytes]), memset(memory.get(), 0xA5, bytes); });
        return memory.get();
    }
};

inline thread_local Block* block;
inline thread_local int turn;
inline thread_local std::vector<int*> touched;  // atomically, since the last fence
inline thread_local bool fenced;                // since the last barrier

template <typename X>
X exchange(X x, int from) {  // what thread `from` of this warp offers
    Warp& warp = *block->warps[threadIdx.x / 32];
    uint64_t* slot = warp.slot[turn ^= 1];
    memcpy(slot + threadIdx.x % 32, &x, sizeof x);
    warp.barrier.arrive_and_wait();
    memcpy(&x, slot + from, sizeof x);
    return x;
}

template <typename Kernel>
struct Launch {
    Kernel kernel;
    int blocks, threads;

    template <typename... Args>
    void operator()(Args... args) const {
        std::atomic<int> next{0};
        auto place = [&] {  // runs blocks one after another, as a multiprocessor does in each of its places
            for (int b; (b = next++) < blocks;) {
                Block here(threads);
                std::vector<std::thread> running;
                for (int t = 0; t < threads; t++) running.emplace_back([&, t] {
                    block = &here, turn = 0, fenced = false;
                    threadIdx.x = t, blockIdx.x = b, blockDim.x = threads;
                    kernel(args...);
                    here.barrier.arrive_and_drop();
                });
                for (auto& thread : running) thread.join();
            }
        };
        std::vector<std::thread> places;
        for (int i = 0; i < min(at_once, blocks); i++) places.emplace_back(place);
        for (auto& thread : places) thread.join();
    }
};

template <typename Kernel>
Launch<Kernel> launch(Kernel kernel, int blocks, int threads, cudaStream_t) { return {kernel, blocks, threads}; }

inline int order(int* at) {
    if (touched.empty() || touched.back() != at) touched.push_back(at);
    return fenced ? __ATOMIC_RELEASE : __ATOMIC_RELAXED;
}

}  // namespace cpu

#define LAUNCH(kernel, blocks, threads, stream) cpu::launch(kernel, blocks, threads, stream)
#define SHARED(type, name) type& name = *static_cast<type*>(cpu::block->shared(sizeof(type)))

inline void __syncthreads() {
    cpu::fenced = false;
    cpu::block->barrier.arrive_and_wait();
}
inline void __threadfence() {
    for (int* at : cpu::touched) (void)__atomic_load_n(at, __ATOMIC_ACQUIRE);
    cpu::touched.clear();
    cpu::fenced = true;
}

template <typename X>
X __shfl_xor_sync(unsigned, X x, int d) { return cpu::exchange(x, (threadIdx.x % 32) ^ d); }
template <typename X>
X __shfl_up_sync(unsigned, X x, int d) {
    const int lane = threadIdx.x % 32;
    return cpu::exchange(x, lane < d ? lane : lane - d);
}

// Orders: see above.
inline int atomicAdd(int* at, int x) {
    return cpu::order(at) == __ATOMIC_RELEASE ? __atomic_fetch_add(at, x, __ATOMIC_RELEASE) : __atomic_fetch_add(at, x, __ATOMIC_RELAXED);
}
inline int atomicExch(int* at, int x) {
    return cpu::order(at) == __ATOMIC_RELEASE ? __atomic_exchange_n(at, x, __ATOMIC_RELEASE) : __atomic_exchange_n(at, x, __ATOMIC_RELAXED);
}
inline void atomicMin(int* at, int x) {  // in shared memory, between barriers
    for (int old = __atomic_load_n(at, __ATOMIC_RELAXED); x < old && !__atomic_compare_exchange_n(at, &old, x, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED);) {}
}
inline void atomicMax(int* at, int x) {
    for (int old = __atomic_load_n(at, __ATOMIC_RELAXED); x > old && !__atomic_compare_exchange_n(at, &old, x, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED);) {}
}
