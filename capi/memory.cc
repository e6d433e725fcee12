// tessera/memory.h: buffers of a communicator.
#include "tessera/memory.h"

#include "comm/communicator.hpp"
#include "handles.hpp"

namespace tsr::capi {

extern "C" {

tsr_status tsr_buffer_create(tsr_comm* comm, size_t size, tsr_buffer** out) {
    return guard([&] { create(out, [&] { return object_of(comm, "comm")->allocate(size); }); });
}

tsr_status tsr_buffer_data(const tsr_buffer* buffer, void** data, size_t* size) {
    return guard([&] {
        const auto& object = object_of(buffer, "buffer");
        required(data, "data") = object->data();
        if (size != nullptr) *size = object->size();
    });
}

void tsr_buffer_destroy(tsr_buffer* buffer) { destroy(buffer); }

}  // extern "C"

}  // namespace tsr::capi
