// What the launcher tells a rank, and what a rank tells the launcher.
#include "jni.hpp"

namespace tsr::jni {

namespace {

jboolean preempt_requested(JNIEnv*, jclass) { return tsr_preempt_requested() != 0; }

void record_error(JNIEnv* env, jclass, jbyteArray message, jbyteArray traceback) {
    shim(env, [&] { check(env, tsr_record_error(Text(env, message).c_str(), Text(env, traceback).c_str())); });
}

void record_error_about(JNIEnv* env, jclass, jbyteArray message, jint code, jint peer) {
    shim(env, [&] { check(env, tsr_record_error_about(Text(env, message).c_str(), nullptr, code, peer)); });
}

}  // namespace

Methods launch_methods() {
    return {method<preempt_requested>("preemptRequested"), method<record_error>("recordError"),
            method<record_error_about>("recordErrorAbout")};
}

}  // namespace tsr::jni
