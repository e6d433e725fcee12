// tessera/data.h: the distributed sampler.
#include "tessera/data.h"

#include "comm/communicator.hpp"
#include "data/sampler.hpp"
#include "handles.hpp"

namespace tsr::capi {

namespace {

constexpr tsr_sampler_options default_options{
    .struct_size = sizeof(tsr_sampler_options), .seed = 0, .shuffle = 1, .drop_last = 0};

}  // namespace

extern "C" {

tsr_status tsr_sampler_options_init(tsr_sampler_options* options, size_t struct_size) {
    return options_init(options, struct_size, default_options, "options");
}

tsr_status tsr_sampler_create(const tsr_comm* comm, int64_t length, const tsr_sampler_options* options,
                              tsr_sampler** out) {
    return guard([&] {
        create(out, [&] {
            const auto& c = object_of(comm, "comm");
            const auto o = options_in(options, default_options, "options");
            return std::make_shared<Sampler>(
                c->rank(), c->world_size(), length,
                SamplerOptions{o.seed, flag(o.shuffle, "shuffle"), flag(o.drop_last, "drop_last")});
        });
    });
}

tsr_status tsr_sampler_next(tsr_sampler* sampler, int64_t* indices, size_t size, size_t* count) {
    return guard([&] {
        auto& s = *object_of(sampler, "sampler");
        required(indices, "indices");
        required(count, "count") = 0;
        *count = s.next({indices, size});
    });
}

tsr_status tsr_sampler_valid(const tsr_sampler* sampler, uint8_t* valid, size_t size) {
    return guard([&] {
        const auto& s = *object_of(sampler, "sampler");
        if (size > 0) required(valid, "valid");
        s.last_valid({valid, size});
    });
}

tsr_status tsr_sampler_position(const tsr_sampler* sampler, int64_t* epoch, int64_t* consumed) {
    return guard([&] {
        const auto& s = *object_of(sampler, "sampler");
        if (epoch != nullptr) *epoch = s.epoch();
        if (consumed != nullptr) *consumed = s.consumed();
    });
}

tsr_status tsr_sampler_set_epoch(tsr_sampler* sampler, int64_t epoch) {
    return guard([&] { object_of(sampler, "sampler")->set_epoch(epoch); });
}

void tsr_sampler_destroy(tsr_sampler* sampler) { destroy(sampler); }

}  // extern "C"

}  // namespace tsr::capi
