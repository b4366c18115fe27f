// Many requests' planes, side by side in the planes of one batch.

typedef unsigned long long u64;
typedef unsigned int u32;

// One plane of the batch: its address, the components of a sample, the bytes of one of them (1, 2, 4 or 8), and the bits
// that a component of a request without this plane is set to.
struct Plane {
    u64 to, width, bytes, fill;
};

template <typename T>
__device__ __forceinline__ void copy(const Plane& plane, const void* from, u64 start, u64 n, u64 capacity) {
    T* to = (T*)plane.to;
    for (u64 i = blockIdx.z * (u64)blockDim.x + threadIdx.x; i < n * plane.width; i += gridDim.z * (u64)blockDim.x) {
        u64 component = i / n;
        to[component * capacity + start + (i - component * n)] = from ? ((const T*)from)[i] : (T)plane.fill;
    }
}

// Block (request, plane, part). A row of `requests`: first sample, samples, then the address of each plane or 0.
extern "C" __global__ void eagle_gather(const u64* requests, const Plane* planes, u64 count, u64 capacity) {
    const u64* row = requests + blockIdx.x * (2 + count);
    Plane plane = planes[blockIdx.y];
    const void* from = (const void*)row[2 + blockIdx.y];
    if (plane.bytes == 8) copy<u64>(plane, from, row[0], row[1], capacity);
    else if (plane.bytes == 4) copy<u32>(plane, from, row[0], row[1], capacity);
    else if (plane.bytes == 2) copy<unsigned short>(plane, from, row[0], row[1], capacity);
    else copy<unsigned char>(plane, from, row[0], row[1], capacity);
}
