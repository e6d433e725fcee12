// Learning-rate schedules that are made of lists.
#include "jni.hpp"

namespace tsr::jni {

namespace {

// The schedules stay open for the call.
std::vector<const tsr_lr_schedule*> schedules_of(JNIEnv* env, jlongArray handles) {
    std::vector<const tsr_lr_schedule*> list;
    for (const int64_t handle : longs(env, handles)) list.push_back(as<tsr_lr_schedule>(handle));
    return list;
}

jlong lr_multi_step_decay(JNIEnv* env, jclass, jlongArray milestones, jdouble gamma) {
    return shim(env, [&] {
        const std::vector<int64_t> steps = longs(env, milestones);
        tsr_lr_schedule* out = nullptr;
        check(env, tsr_lr_multi_step_decay(steps.data(), steps.size(), gamma, &out));
        return as_long(out);
    });
}

jlong lr_sequential(JNIEnv* env, jclass, jlongArray schedules, jlongArray milestones) {
    return shim(env, [&] {
        const auto list = schedules_of(env, schedules);
        const std::vector<int64_t> steps = longs(env, milestones);
        tsr_lr_schedule* out = nullptr;
        check(env, tsr_lr_sequential(list.data(), list.size(), steps.data(), steps.size(), &out));
        return as_long(out);
    });
}

jlong lr_chained(JNIEnv* env, jclass, jlongArray schedules) {
    return shim(env, [&] {
        const auto list = schedules_of(env, schedules);
        tsr_lr_schedule* out = nullptr;
        check(env, tsr_lr_chained(list.data(), list.size(), &out));
        return as_long(out);
    });
}

}  // namespace

Methods lr_schedule_methods() {
    return {method<lr_multi_step_decay>("lrMultiStepDecay"), method<lr_sequential>("lrSequential"),
            method<lr_chained>("lrChained")};
}

}  // namespace tsr::jni
