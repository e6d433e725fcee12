// Communicators and collectives. Each collective has one shim: with `async` it returns a tsr_work, else it returns 0
// when the operation is done. The memory behind the tensors is kept alive by the Java side until then.
#include "jni.hpp"

namespace tsr::jni {

namespace {

// Bits of `given`: 0 timeout_ms, 1 spin_count, 2 heartbeat_timeout_ms; the texts are NULL where they were not set.
struct Options {
    Text backend, name;
    tsr_comm_options value;

    Options(JNIEnv* env, jint given, jint timeout_ms, jint heartbeat_timeout_ms, jint spin_count,
            jbyteArray backend_bytes, jbyteArray name_bytes)
        : backend(env, backend_bytes), name(env, name_bytes) {
        check(env, tsr_comm_options_init(&value, sizeof value));
        set_if(given, 0, value.timeout_ms, timeout_ms);
        set_if(given, 1, value.spin_count, spin_count);
        set_if(given, 2, value.heartbeat_timeout_ms, heartbeat_timeout_ms);
        if (backend_bytes != nullptr) value.backend = backend.c_str();
        if (name_bytes != nullptr) value.name = name.c_str();
    }
};

jlong comm_from_env(JNIEnv* env, jclass, jint given, jint timeout_ms, jint heartbeat_timeout_ms, jint spin_count,
                    jbyteArray backend, jbyteArray name) {
    return shim(env, [&] {
        const Options options(env, given, timeout_ms, heartbeat_timeout_ms, spin_count, backend, name);
        tsr_comm* comm = nullptr;
        blocking(env, [&] { return tsr_comm_from_env(&options.value, &comm); });
        return as_long(comm);
    });
}

jlong comm_create(JNIEnv* env, jclass, jlong store, jint rank, jint world_size, jint given, jint timeout_ms,
                  jint heartbeat_timeout_ms, jint spin_count, jbyteArray backend, jbyteArray name) {
    return shim(env, [&] {
        const Options options(env, given, timeout_ms, heartbeat_timeout_ms, spin_count, backend, name);
        tsr_comm* comm = nullptr;
        blocking(env, [&] { return tsr_comm_create(as<tsr_store>(store), rank, world_size, &options.value, &comm); });
        return as_long(comm);
    });
}

// `inherit`: the options of `comm`, which are passed as NULL.
jlong comm_split(JNIEnv* env, jclass, jlong comm, jint color, jint key, jboolean inherit, jint given, jint timeout_ms,
                 jint heartbeat_timeout_ms, jint spin_count, jbyteArray backend, jbyteArray name) {
    return shim(env, [&] {
        const Options options(env, given, timeout_ms, heartbeat_timeout_ms, spin_count, backend, name);
        tsr_comm* group = nullptr;
        blocking(env, [&] {
            return tsr_comm_split(as<tsr_comm>(comm), color, key, inherit ? nullptr : &options.value, &group);
        });
        return as_long(group);
    });
}

jlong comm_shrink(JNIEnv* env, jclass, jlong comm, jboolean inherit, jint given, jint timeout_ms,
                  jint heartbeat_timeout_ms, jint spin_count, jbyteArray backend, jbyteArray name) {
    return shim(env, [&] {
        const Options options(env, given, timeout_ms, heartbeat_timeout_ms, spin_count, backend, name);
        tsr_comm* rest = nullptr;
        blocking(env, [&] { return tsr_comm_shrink(as<tsr_comm>(comm), inherit ? nullptr : &options.value, &rest); });
        return as_long(rest);
    });
}

void comm_finalize(JNIEnv* env, jclass, jlong comm) {
    shim(env, [&] { blocking(env, [&] { return tsr_comm_finalize(as<tsr_comm>(comm)); }); });
}

void comm_abort(JNIEnv* env, jclass, jlong comm, jbyteArray reason) {
    shim(env, [&] { check(env, tsr_comm_abort(as<tsr_comm>(comm), Text(env, reason).c_str())); });
}

void comm_destroy(JNIEnv*, jclass, jlong comm) { tsr_comm_destroy(as<tsr_comm>(comm)); }

jint comm_rank(JNIEnv* env, jclass, jlong comm) {
    return shim(env, [&]() -> jint {
        int32_t rank = 0;
        check(env, tsr_comm_rank(as<tsr_comm>(comm), &rank));
        return rank;
    });
}

jint comm_world_size(JNIEnv* env, jclass, jlong comm) {
    return shim(env, [&]() -> jint {
        int32_t size = 0;
        check(env, tsr_comm_world_size(as<tsr_comm>(comm), &size));
        return size;
    });
}

jbyteArray comm_transport(JNIEnv* env, jclass, jlong comm) {
    return shim(env, [&] {
        const char* name = nullptr;
        check(env, tsr_comm_transport(as<tsr_comm>(comm), &name));
        return bytes_of(env, name);
    });
}

void comm_write_trace(JNIEnv* env, jclass, jlong comm, jbyteArray path) {
    shim(env, [&] { check(env, tsr_comm_write_trace(as<tsr_comm>(comm), Text(env, path).c_str())); });
}

void comm_set_timeout(JNIEnv* env, jclass, jlong comm, jint timeout_ms) {
    shim(env, [&] { check(env, tsr_comm_set_timeout(as<tsr_comm>(comm), timeout_ms)); });
}

jint comm_timeout(JNIEnv* env, jclass, jlong comm) {
    return shim(env, [&]() -> jint {
        int32_t timeout_ms = 0;
        check(env, tsr_comm_timeout(as<tsr_comm>(comm), &timeout_ms));
        return timeout_ms;
    });
}

jobject comm_error(JNIEnv* env, jclass, jlong comm) {
    return shim(env, [&] {
        tsr_error* error = nullptr;
        check(env, tsr_comm_error(as<tsr_comm>(comm), &error));
        struct Free {
            tsr_error* error;
            ~Free() { tsr_error_destroy(error); }
        } const free{error};
        return exception_of(env, error);
    });
}

// Runs issue(work_out) now, or asynchronously if a work is wanted.
template <class Issue>
jlong run(JNIEnv* env, jboolean async, Issue&& issue) {
    tsr_work* work = nullptr;
    blocking(env, [&] { return issue(async ? &work : nullptr); });
    return as_long(work);
}

jlong comm_all_reduce(JNIEnv* env, jclass, jlong comm, jlongArray tensors, jint op, jboolean async) {
    return shim(env, [&] {
        const Tensors list(env, tensors);
        return run(env, async, [&](tsr_work** work) {
            return tsr_comm_all_reduce(as<tsr_comm>(comm), list.data(), list.size(), op, nullptr, work);
        });
    });
}

jlong comm_reduce_scatter(JNIEnv* env, jclass, jlong comm, jlongArray input, jlongArray output, jint op,
                          jboolean async) {
    return shim(env, [&] {
        const Tensors in(env, input), out(env, output);
        return run(env, async, [&](tsr_work** work) {
            return tsr_comm_reduce_scatter(as<tsr_comm>(comm), in.data(), out.data(), op, nullptr, work);
        });
    });
}

jlong comm_all_gather(JNIEnv* env, jclass, jlong comm, jlongArray input, jlongArray output, jboolean async) {
    return shim(env, [&] {
        const Tensors in(env, input), out(env, output);
        return run(env, async, [&](tsr_work** work) {
            return tsr_comm_all_gather(as<tsr_comm>(comm), in.data(), out.data(), nullptr, work);
        });
    });
}

// The Java side has checked that the lists are as long as each other.
jlong comm_reduce_scatter_coalesced(JNIEnv* env, jclass, jlong comm, jlongArray inputs, jlongArray outputs, jint op,
                                    jboolean async) {
    return shim(env, [&] {
        const Tensors in(env, inputs), out(env, outputs);
        return run(env, async, [&](tsr_work** work) {
            return tsr_comm_reduce_scatter_coalesced(as<tsr_comm>(comm), in.data(), out.data(), in.size(), op, nullptr,
                                                     work);
        });
    });
}

jlong comm_all_gather_coalesced(JNIEnv* env, jclass, jlong comm, jlongArray inputs, jlongArray outputs,
                                jboolean async) {
    return shim(env, [&] {
        const Tensors in(env, inputs), out(env, outputs);
        return run(env, async, [&](tsr_work** work) {
            return tsr_comm_all_gather_coalesced(as<tsr_comm>(comm), in.data(), out.data(), in.size(), nullptr, work);
        });
    });
}

// The Java side has checked that there is one output a rank.
jlong comm_all_gather_v(JNIEnv* env, jclass, jlong comm, jlongArray input, jlongArray outputs, jboolean async) {
    return shim(env, [&] {
        const Tensors in(env, input), out(env, outputs);
        return run(env, async, [&](tsr_work** work) {
            return tsr_comm_all_gather_v(as<tsr_comm>(comm), in.data(), out.data(), nullptr, work);
        });
    });
}

jlong comm_broadcast(JNIEnv* env, jclass, jlong comm, jlongArray tensors, jint root, jboolean async) {
    return shim(env, [&] {
        const Tensors list(env, tensors);
        return run(env, async, [&](tsr_work** work) {
            return tsr_comm_broadcast(as<tsr_comm>(comm), list.data(), list.size(), root, nullptr, work);
        });
    });
}

jlong comm_reduce(JNIEnv* env, jclass, jlong comm, jlongArray input, jlongArray output, jint op, jint root,
                  jboolean async) {
    return shim(env, [&] {
        const Tensors in(env, input), out(env, output);
        return run(env, async, [&](tsr_work** work) {
            return tsr_comm_reduce(as<tsr_comm>(comm), in.data(), out.data(), op, root, nullptr, work);
        });
    });
}

jlong comm_gather(JNIEnv* env, jclass, jlong comm, jlongArray input, jlongArray output, jint root, jboolean async) {
    return shim(env, [&] {
        const Tensors in(env, input), out(env, output);
        return run(env, async, [&](tsr_work** work) {
            return tsr_comm_gather(as<tsr_comm>(comm), in.data(), out.data(), root, nullptr, work);
        });
    });
}

jlong comm_scatter(JNIEnv* env, jclass, jlong comm, jlongArray input, jlongArray output, jint root, jboolean async) {
    return shim(env, [&] {
        const Tensors in(env, input), out(env, output);
        return run(env, async, [&](tsr_work** work) {
            return tsr_comm_scatter(as<tsr_comm>(comm), in.data(), out.data(), root, nullptr, work);
        });
    });
}

jlong comm_all_to_all(JNIEnv* env, jclass, jlong comm, jlongArray input, jlongArray output, jboolean async) {
    return shim(env, [&] {
        const Tensors in(env, input), out(env, output);
        return run(env, async, [&](tsr_work** work) {
            return tsr_comm_all_to_all(as<tsr_comm>(comm), in.data(), out.data(), nullptr, work);
        });
    });
}

jlong comm_send(JNIEnv* env, jclass, jlong comm, jlongArray tensor, jint peer, jint tag, jboolean async) {
    return shim(env, [&] {
        const Tensors one(env, tensor);
        return run(env, async, [&](tsr_work** work) {
            return tsr_comm_send(as<tsr_comm>(comm), one.data(), peer, tag, nullptr, work);
        });
    });
}

jlong comm_recv(JNIEnv* env, jclass, jlong comm, jlongArray tensor, jint peer, jint tag, jboolean async) {
    return shim(env, [&] {
        const Tensors one(env, tensor);
        return run(env, async, [&](tsr_work** work) {
            return tsr_comm_recv(as<tsr_comm>(comm), one.data(), peer, tag, nullptr, work);
        });
    });
}

jlong comm_barrier(JNIEnv* env, jclass, jlong comm, jboolean async) {
    return shim(env, [&] {
        return run(env, async, [&](tsr_work** work) { return tsr_comm_barrier(as<tsr_comm>(comm), work); });
    });
}

}  // namespace

Methods comm_methods() {
    return {method<comm_from_env>("commFromEnv"),
            method<comm_create>("commCreate"),
            method<comm_split>("commSplit"),
            method<comm_shrink>("commShrink"),
            method<comm_finalize>("commFinalize"),
            method<comm_abort>("commAbort"),
            method<comm_destroy>("commDestroy"),
            method<comm_rank>("commRank"),
            method<comm_world_size>("commWorldSize"),
            method<comm_transport>("commTransport"),
            method<comm_set_timeout>("commSetTimeout"),
            method<comm_timeout>("commTimeout"),
            method<comm_error>("commError"),
            method<comm_write_trace>("commWriteTrace"),
            method<comm_all_reduce>("commAllReduce"),
            method<comm_reduce_scatter>("commReduceScatter"),
            method<comm_all_gather>("commAllGather"),
            method<comm_reduce_scatter_coalesced>("commReduceScatterCoalesced"),
            method<comm_all_gather_coalesced>("commAllGatherCoalesced"),
            method<comm_all_gather_v>("commAllGatherV"),
            method<comm_broadcast>("commBroadcast"),
            method<comm_reduce>("commReduce"),
            method<comm_gather>("commGather"),
            method<comm_scatter>("commScatter"),
            method<comm_all_to_all>("commAllToAll"),
            method<comm_send>("commSend"),
            method<comm_recv>("commRecv"),
            method<comm_barrier>("commBarrier")};
}

}  // namespace tsr::jni
