// The device half of an active set: which samples are live, as an ascending map, and the reorder that packs them.
//
// A compaction is three launches: eagle_count (live samples of each tile), eagle_scan (one block: tile offsets, the
// total, and whether the live samples lie so scattered that a reorder pays), eagle_scatter (the map). Every sum is of
// integers in a fixed order, so equal masks give equal maps. A reorder is eagle_source (which slot each slot takes its
// sample from), then eagle_take and eagle_put for every row (through a scratch row), eagle_adopt (perm, inv, map) and
// eagle_close (the words). Each of these looks at its guard word first and does nothing when it is zero, so a captured
// reorder decides at replay. Nothing allocates or waits.
//
// The words, one uint32 each, as Word in compaction.py numbers them:
#define COUNT 0
#define SPAN 1
#define FIRE 2
#define LIVE32 3
#define REORDERS 4
#define MOVED 5
#define EXTENT 6
#define SIZE 7

#define ITEMS 8  // mask bytes of one thread: one 64-bit load
#define THREADS 256
#define TILE (THREADS * ITEMS)
#define SCAN_THREADS 1024
#define FULL 0xffffffffu

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// Bit k is set when slot first + k exists and is live.
__device__ u32 live_bits(const u8* mask, u32 first, u32 n) {
    u32 bits = 0;
    if (first + ITEMS <= n && ((u64)(mask + first) & (ITEMS - 1)) == 0) {
        const u64 word = *(const u64*)(mask + first);
        for (int k = 0; k < ITEMS; ++k) bits |= (u32)(((word >> (8 * k)) & 255) == 0) << k;
    } else {
        for (int k = 0; k < ITEMS; ++k)
            if (first + k < n && mask[first + k] == 0) bits |= 1u << k;
    }
    return bits;
}

__device__ u32 warp_sum(u32 value) {
    for (int step = 16; step > 0; step >>= 1) value += __shfl_down_sync(FULL, value, step);
    return value;
}

__device__ u32 warp_scan(u32 value) {  // inclusive
    const int lane = threadIdx.x & 31;
    for (int step = 1; step < 32; step <<= 1) {
        const u32 before = __shfl_up_sync(FULL, value, step);
        if (lane >= step) value += before;
    }
    return value;
}

// Inclusive sum over the block's threads, the block's sum in *total. `partial` has room for one word a warp; all threads
// of the block call it.
__device__ u32 block_scan(u32 value, u32* partial, u32* total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    value = warp_scan(value);
    if (lane == 31) partial[warp] = value;
    __syncthreads();
    if (warp == 0) {
        const u32 sums = warp_scan(lane < warps ? partial[lane] : 0);
        if (lane < warps) partial[lane] = sums;
    }
    __syncthreads();
    if (warp > 0) value += partial[warp - 1];
    *total = partial[warps - 1];
    __syncthreads();  // `partial` may be used again
    return value;
}

// tiles[b] = live samples of tile b (12 bits) and, above bit 16, its groups of 32 slots with a live sample (7 bits).
extern "C" __global__ void eagle_count(const u8* mask, u32 n, u32* tiles) {
    __shared__ u32 partial[THREADS / 32];
    const int lane = threadIdx.x & 31;
    const u32 bits = live_bits(mask, blockIdx.x * TILE + threadIdx.x * ITEMS, n);
    const u32 occupied = __ballot_sync(FULL, bits != 0);
    u32 share = __popc(bits);
    if ((lane & 3) == 0 && ((occupied >> lane) & 15) != 0) share += 1u << 16;  // four threads hold one group
    share = warp_sum(share);
    if (lane == 0) partial[threadIdx.x >> 5] = share;
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 sum = 0;
        for (int warp = 0; warp < THREADS / 32; ++warp) sum += partial[warp];
        tiles[blockIdx.x] = sum;
    }
}

// One block. tiles[b] becomes the live samples before tile b. `theta` is 0 for a set that does not reorder; `finished`
// and `baseline` may be null.
extern "C" __global__ void eagle_scan(u32* tiles, u32 tile_count, u32* words, double theta, u32 min_span,
                                      const u32* finished, u32* baseline) {
    __shared__ u32 partial[32];
    u32 live = 0, groups = 0;
    for (u32 base = 0; base < tile_count; base += SCAN_THREADS) {
        const u32 tile = base + threadIdx.x;
        const u32 packed = tile < tile_count ? tiles[tile] : 0;
        const u32 mine = packed & 0xffff;
        u32 total;
        const u32 upto = block_scan(mine, partial, &total);
        if (tile < tile_count) tiles[tile] = live + upto - mine;
        live += total;
        groups += packed >> 16;
    }
    u32 all_groups;
    block_scan(groups, partial, &all_groups);
    if (threadIdx.x != 0) return;
    words[COUNT] = live;
    words[LIVE32] = all_groups;
    words[FIRE] = theta > 0.0 && words[SPAN] >= min_span && (double)live < theta * 32.0 * (double)all_groups;
    if (baseline) baseline[0] = finished[0];
}

extern "C" __global__ void eagle_scatter(const u8* mask, u32 n, const u32* tiles, int* map) {
    __shared__ u32 partial[32];
    const u32 first = blockIdx.x * TILE + threadIdx.x * ITEMS;
    u32 bits = live_bits(mask, first, n), total;
    const u32 mine = __popc(bits);
    u32 at = tiles[blockIdx.x] + block_scan(mine, partial, &total) - mine;
    for (; bits; bits &= bits - 1) map[at++] = (int)(first + __ffs(bits) - 1);
}

// source[d] = the slot whose sample slot d takes: the live ones of the map first, then the rest in slot order.
extern "C" __global__ void eagle_source(const int* map, u32 n, u32* words, int* source) {
    if (words[FIRE] == 0) return;
    const u32 count = words[COUNT];
    u32 extent = words[SPAN];
    if (count > 0 && (u32)map[count - 1] >= extent) extent = n;  // a sample behind the span was revived
    if (blockIdx.x == 0 && threadIdx.x == 0) words[EXTENT] = extent;
    for (u32 slot = blockIdx.x * blockDim.x + threadIdx.x; slot < extent; slot += gridDim.x * blockDim.x) {
        u32 low = 0, high = count;  // how many live slots lie before this one
        while (low < high) {
            const u32 middle = (low + high) >> 1;
            if ((u32)map[middle] < slot) low = middle + 1;
            else high = middle;
        }
        const bool live = low < count && (u32)map[low] == slot;
        source[live ? low : count + (slot - low)] = (int)slot;
    }
}

struct Wide { u64 low, high; };

// Both are guarded by *guard and move *length samples.
#define MOVES(BYTES, TYPE)                                                                                          \
    extern "C" __global__ void eagle_take_##BYTES(const TYPE* row, const int* index, TYPE* out, const u32* guard,   \
                                                  const u32* length) {                                              \
        if (*guard == 0) return;                                                                                    \
        const u32 size = *length;                                                                                   \
        for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x)                  \
            out[i] = row[index[i]];                                                                                 \
    }                                                                                                               \
    extern "C" __global__ void eagle_put_##BYTES(const TYPE* from, TYPE* row, const u32* guard,                     \
                                                 const u32* length) {                                               \
        if (*guard == 0) return;                                                                                    \
        const u32 size = *length;                                                                                   \
        for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x) row[i] = from[i]; \
    }

MOVES(1, u8)
MOVES(2, unsigned short)
MOVES(4, u32)
MOVES(8, u64)
MOVES(16, Wide)

// `samples` is the permuted perm, in scratch.
extern "C" __global__ void eagle_adopt(const int* samples, int* perm, int* inv, int* map, const u32* words) {
    if (words[FIRE] == 0) return;
    const u32 extent = words[EXTENT];
    for (u32 slot = blockIdx.x * blockDim.x + threadIdx.x; slot < extent; slot += gridDim.x * blockDim.x) {
        const int sample = samples[slot];
        perm[slot] = sample;
        inv[sample] = (int)slot;
        map[slot] = (int)slot;
    }
}

extern "C" __global__ void eagle_close(u32* words) {
    if (words[FIRE] == 0) return;
    words[SPAN] = words[COUNT];
    words[FIRE] = 0;
    words[REORDERS] += 1;
    words[MOVED] = 1;
}

// Identities: of perm and inv (null for a set that does not reorder) and of the map (null while deferred).
extern "C" __global__ void eagle_identity(int* perm, int* inv, int* map, u32 n) {
    for (u32 slot = blockIdx.x * blockDim.x + threadIdx.x; slot < n; slot += gridDim.x * blockDim.x) {
        if (perm) perm[slot] = (int)slot;
        if (inv) inv[slot] = (int)slot;
        if (map) map[slot] = (int)slot;
    }
}

// The words of a set whose planes are in sample order; `fresh` also forgets what it counted.
extern "C" __global__ void eagle_home(u32* words, u32 n, u32 fresh) {
    words[SPAN] = words[SIZE] = n;
    words[FIRE] = words[MOVED] = words[EXTENT] = 0;
    if (!fresh) return;
    words[COUNT] = n;
    words[LIVE32] = words[REORDERS] = 0;
}
