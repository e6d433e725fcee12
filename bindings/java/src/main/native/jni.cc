// Loading and the conversions of jni.hpp. The JVM's pointer is written once, in JNI_OnLoad, before any other call.
#include "jni.hpp"

#include <cstring>
#include <stdexcept>

namespace tsr::jni {

namespace {

JavaVM* java_vm = nullptr;
jfieldID option_struct = nullptr;

// Detaches a thread of the library when it ends, if attached_env() attached it.
struct Attachment {
    bool attached = false;
    ~Attachment() {
        if (attached && java_vm != nullptr) java_vm->DetachCurrentThread();
    }
};

thread_local Attachment attachment;

}  // namespace

JNIEnv* attached_env() noexcept {
    if (java_vm == nullptr) return nullptr;
    void* env = nullptr;
    if (java_vm->GetEnv(&env, JNI_VERSION_1_8) == JNI_OK) return static_cast<JNIEnv*>(env);
    JavaVMAttachArgs args{JNI_VERSION_1_8, const_cast<char*>("tessera"), nullptr};
    if (java_vm->AttachCurrentThreadAsDaemon(&env, &args) != JNI_OK) return nullptr;
    attachment.attached = true;
    return static_cast<JNIEnv*>(env);
}

jclass global_class(JNIEnv* env, const char* name) {
    const jclass local = env->FindClass(name);
    check_pending(env);
    const auto global = static_cast<jclass>(env->NewGlobalRef(local));
    env->DeleteLocalRef(local);
    if (global == nullptr) throw std::bad_alloc();
    return global;
}

jmethodID static_method(JNIEnv* env, jclass type, const char* name, const char* signature) {
    const jmethodID id = env->GetStaticMethodID(type, name, signature);
    check_pending(env);
    return id;
}

jmethodID instance_method(JNIEnv* env, jclass type, const char* name, const char* signature) {
    const jmethodID id = env->GetMethodID(type, name, signature);
    check_pending(env);
    return id;
}

Text::Text(JNIEnv* env, jbyteArray bytes) : null_(bytes == nullptr) {
    if (null_) return;
    value_.resize(static_cast<size_t>(env->GetArrayLength(bytes)));
    env->GetByteArrayRegion(bytes, 0, static_cast<jsize>(value_.size()), reinterpret_cast<jbyte*>(value_.data()));
    check_pending(env);
}

std::vector<Text> texts(JNIEnv* env, jobjectArray arrays) {
    std::vector<Text> out;
    const jsize count = env->GetArrayLength(arrays);
    out.reserve(static_cast<size_t>(count));
    for (jsize i = 0; i < count; ++i) {
        const auto element = static_cast<jbyteArray>(env->GetObjectArrayElement(arrays, i));
        check_pending(env);
        out.emplace_back(env, element);
        env->DeleteLocalRef(element);
    }
    return out;
}

std::vector<int64_t> longs(JNIEnv* env, jlongArray array) {
    static_assert(sizeof(jlong) == sizeof(int64_t));
    if (array == nullptr) return {};
    std::vector<int64_t> out(static_cast<size_t>(env->GetArrayLength(array)));
    env->GetLongArrayRegion(array, 0, static_cast<jsize>(out.size()), reinterpret_cast<jlong*>(out.data()));
    check_pending(env);
    return out;
}

std::vector<int32_t> ints(JNIEnv* env, jintArray array) {
    if (array == nullptr) return {};
    std::vector<int32_t> out(static_cast<size_t>(env->GetArrayLength(array)));
    env->GetIntArrayRegion(array, 0, static_cast<jsize>(out.size()), reinterpret_cast<jint*>(out.data()));
    check_pending(env);
    return out;
}

jbyteArray bytes_of(JNIEnv* env, const void* data, size_t size) {
    if (size > 0x7fffffff) throw std::length_error("more than 2 GiB do not fit a byte[]");
    const jbyteArray array = env->NewByteArray(static_cast<jsize>(size));
    check_pending(env);
    env->SetByteArrayRegion(array, 0, static_cast<jsize>(size), static_cast<const jbyte*>(data));
    check_pending(env);
    return array;
}

jbyteArray bytes_of(JNIEnv* env, const char* text) { return bytes_of(env, text, std::strlen(text)); }

jlongArray longs_of(JNIEnv* env, const int64_t* values, size_t count) {
    const jlongArray array = env->NewLongArray(static_cast<jsize>(count));
    check_pending(env);
    env->SetLongArrayRegion(array, 0, static_cast<jsize>(count), reinterpret_cast<const jlong*>(values));
    check_pending(env);
    return array;
}

void load_option_classes(JNIEnv* env) {
    option_struct = env->GetFieldID(global_class(env, "dev/tessera/OptionStruct"), "struct", "Ljava/nio/ByteBuffer;");
    check_pending(env);
}

void* struct_of(JNIEnv* env, jobject options, size_t size) {
    if (options == nullptr) return nullptr;
    const jobject buffer = env->GetObjectField(options, option_struct);
    if (env->GetDirectBufferCapacity(buffer) != static_cast<jlong>(size))
        throw std::logic_error("another struct of options");
    return env->GetDirectBufferAddress(buffer);
}

namespace {

// The tensor whose descriptor begins there.
tsr_tensor tensor_at(const int64_t* word) {
    tsr_tensor tensor{};
    tensor.data = as<void>(word[0]);
    tensor.dtype = static_cast<tsr_dtype>(word[1]);
    tensor.device_type = static_cast<int32_t>(word[2]);
    tensor.device_index = static_cast<int32_t>(word[3]);
    tensor.ndim = static_cast<int32_t>(word[4]);
    tensor.shape = word + descriptor_words;
    return tensor;
}

size_t words_of(const tsr_tensor& tensor) { return descriptor_words + static_cast<size_t>(tensor.ndim); }

}  // namespace

Tensors::Tensors(JNIEnv* env, jlongArray descriptors) {
    if (descriptors == nullptr) return;
    const auto count = static_cast<size_t>(env->GetArrayLength(descriptors));
    if (count > 0 && count <= one_words_.size()) {
        env->GetLongArrayRegion(descriptors, 0, static_cast<jsize>(count), reinterpret_cast<jlong*>(one_words_.data()));
        one_ = tensor_at(one_words_.data());
        if (words_of(one_) == count) {
            data_ = &one_;
            size_ = 1;
            return;
        }
    }
    words_ = longs(env, descriptors);
    for (size_t i = 0; i < words_.size(); i += words_of(tensors_.back())) tensors_.push_back(tensor_at(&words_[i]));
    data_ = tensors_.empty() ? nullptr : tensors_.data();
    size_ = tensors_.size();
}

void describe(std::vector<int64_t>& words, const tsr_tensor& tensor) {
    words.insert(words.end(), {as_long(tensor.data) + static_cast<int64_t>(tensor.byte_offset), tensor.dtype,
                               tensor.device_type, tensor.device_index, tensor.ndim});
    words.insert(words.end(), tensor.shape, tensor.shape + tensor.ndim);
}

jlongArray descriptor_of(JNIEnv* env, const tsr_tensor& tensor) {
    std::vector<int64_t> words;
    describe(words, tensor);
    return longs_of(env, words.data(), words.size());
}

Params::Params(JNIEnv* env, jobjectArray names, jlongArray descriptors)
    : names_(texts(env, names)), tensors_(env, descriptors) {
    if (names_.size() != tensors_.size()) throw std::logic_error("names and tensors differ in number");
    for (size_t i = 0; i < names_.size(); ++i) params_.push_back({names_[i].c_str(), tensors_[i]});
}

}  // namespace tsr::jni

extern "C" JNIEXPORT jint JNICALL JNI_OnLoad(JavaVM* vm, void*) {
    using namespace tsr::jni;
    void* raw = nullptr;
    if (vm->GetEnv(&raw, JNI_VERSION_1_8) != JNI_OK) return JNI_ERR;
    auto* env = static_cast<JNIEnv*>(raw);
    java_vm = vm;
    return shim(env, [&]() -> jint {
        load_checkpoint_classes(env);
        load_ddp_classes(env);
        load_error_classes(env);
        load_interrupt_classes(env);
        load_log_classes(env);
        load_option_classes(env);
        load_pipeline_classes(env);
        load_tp_classes(env);
        load_work_classes(env);
        load_storage_classes(env);
        load_state_classes(env);
        const auto add = [&](jclass natives, const Methods& methods) {
            if (env->RegisterNatives(natives, methods.data(), static_cast<jint>(methods.size())) != JNI_OK) {
                throw Pending{};
            }
        };
        add(global_class(env, "dev/tessera/PlainNatives"), plain_methods());
        const jclass natives = global_class(env, "dev/tessera/Native");
        for (const auto& list :
             {version_methods, log_methods, store_methods, work_methods, memory_methods, mesh_methods, layout_methods,
              ddp_methods, fsdp_methods, engine_methods, tp_methods, pipeline_methods, lr_schedule_methods,
              data_methods, state_methods, checkpoint_methods, storage_methods}) {
            add(natives, list());
        }
        return JNI_VERSION_1_8;
    });
}
