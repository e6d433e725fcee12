// tessera/checkpoint.h: savers and committed checkpoints. A callback may destroy the object that it serves, so
// functions that may call one hold the object.
#include "tessera/checkpoint.h"

#include "base/env.hpp"
#include "base/log.hpp"
#include "checkpoint/export/export.hpp"
#include "checkpoint/io/storage.hpp"
#include "checkpoint/load/checkpoint.hpp"
#include "checkpoint/model/state.hpp"
#include "checkpoint/save/saver.hpp"
#include "comm/communicator.hpp"
#include "comm/work.hpp"
#include "handles.hpp"
#include "launch/preempt.hpp"

namespace tsr::capi {

namespace {

tsr_saver_options default_saver_options() {
    tsr_saver_options options{};
    options.struct_size = sizeof options;
    options.timeout_ms = static_cast<int32_t>(env_number("TESSERA_TIMEOUT_MS", 1, INT32_MAX).value_or(600000));
    return options;
}

constexpr tsr_load_options default_load_options{.struct_size = sizeof(tsr_load_options),
                                                .verify = 1,
                                                .allow_missing = 0,
                                                .allow_unexpected = 0,
                                                .allow_cast = 0,
                                                .progress = nullptr,
                                                .progress_data = nullptr,
                                                .comm = nullptr,
                                                .only = nullptr,
                                                .only_count = 0,
                                                .rules = nullptr,
                                                .rule_count = 0,
                                                .report = nullptr,
                                                .report_data = nullptr};

ProgressFn progress_in(tsr_progress_fn progress, void* user_data) {
    if (progress == nullptr) return {};
    return [progress, user_data](Phase phase, int64_t done, int64_t total) {
        progress(static_cast<int32_t>(phase), done, total, user_data);
    };
}

SaverOptions saver_options_in(const tsr_saver_options* options) {
    const auto o = options_in(options, default_saver_options(), "options");
    if (o.timeout_ms <= 0) {
        throw Error(Code::invalid_argument, fmt::format("the timeout is {} ms; it must be positive", o.timeout_ms));
    }
    SaverOptions out;
    out.retention.latest = o.keep_latest;
    out.retention.best = o.keep_best;
    out.retention.every = o.keep_every;
    const bool higher = flag(o.best_is_higher, "best_is_higher");
    if (o.best_metric != nullptr) {
        out.retention.rule = BestRule{name_in(o.best_metric, "best_metric"), higher ? Better::higher : Better::lower};
    }
    const std::string_view format = o.format != nullptr ? o.format : "tessera";
    if (format == torch_dcp_format) {
        out.format = SaveFormat::torch_dcp;
    } else if (format != "tessera") {
        throw Error(Code::invalid_argument,
                    fmt::format("format is '{}'; it must be 'tessera' or '{}'", format, torch_dcp_format));
    }
    out.timeout = milliseconds{o.timeout_ms};
    if (o.when_busy < TSR_BUSY_WAIT || o.when_busy > TSR_BUSY_REPLACE) {
        throw Error(Code::invalid_argument,
                    fmt::format("when_busy is {}; it must be 0 to 2 (wait, refuse or replace)", o.when_busy));
    }
    out.when_busy = static_cast<WhenBusy>(o.when_busy);
    out.priority = flag(o.low_priority, "low_priority") ? Priority::low : Priority::normal;
    out.copies = flag(o.copy_on_demand, "copy_on_demand") ? Copies::on_demand : Copies::at_once;
    out.check_replicas = flag(o.check_replicas, "check_replicas") ? CheckReplicas::yes : CheckReplicas::no;
    out.staging_bytes = o.staging_bytes;
    out.write_bytes_per_s = o.write_bytes_per_s;
    out.progress = progress_in(o.progress, o.progress_data);
    out.writer = {fmt::format("tessera {}", tsr_version()), o.writer != nullptr ? o.writer : "c",
                  o.writer_version != nullptr ? o.writer_version : ""};
    for (const std::string& text : {out.writer.language, out.writer.version}) {
        if (!is_utf8(text)) throw Error(Code::invalid_argument, "the writer's name is not UTF-8");
    }
    return out;
}

constexpr tsr_open_options default_open_options{.struct_size = sizeof(tsr_open_options), .storage = nullptr};

// The files of a storage live as long as the object that uses them.
struct SaverAndFiles {
    std::unique_ptr<FileSystem> files;
    std::unique_ptr<Saver> saver;
};
struct CheckpointAndFiles {
    std::unique_ptr<FileSystem> files;
    std::shared_ptr<const Checkpoint> checkpoint;
};

std::unique_ptr<FileSystem> files_of(const tsr_storage* storage) {
    return storage != nullptr ? storage_files(object_of(storage, "storage")) : nullptr;
}

Allow allow(int32_t value, const char* what) { return flag(value, what) ? Allow::yes : Allow::no; }

LoadOptions load_options_in(const tsr_load_options& o) {
    LoadOptions out;
    out.verify = flag(o.verify, "verify") ? Verify::blocks : Verify::none;
    out.missing = allow(o.allow_missing, "allow_missing");
    out.unexpected = allow(o.allow_unexpected, "allow_unexpected");
    out.cast = allow(o.allow_cast, "allow_cast");
    out.progress = progress_in(o.progress, o.progress_data);
    if (o.comm != nullptr) out.comm = object_of(o.comm, "comm");
    if (o.only != nullptr && o.only_count == 0) {
        throw Error(Code::invalid_argument, "only has no patterns; leave it out to load all names");
    }
    for (size_t i = 0; i < o.only_count; ++i) {
        out.only.push_back(name_in((&required(o.only, "only"))[i], fmt::format("only[{}]", i).c_str()));
    }
    for (size_t i = 0; i < o.rule_count; ++i) {
        const tsr_name_rule& rule = (&required(o.rules, "rules"))[i];
        out.rules.push_back({name_in(rule.saved, fmt::format("rules[{}].saved", i).c_str()),
                             name_in(rule.here, fmt::format("rules[{}].here", i).c_str())});
    }
    return out;
}

tsr_export_options default_export_options() {
    tsr_export_options options{};
    options.struct_size = sizeof options;
    options.timeout_ms = default_saver_options().timeout_ms;
    return options;
}

ExportOptions export_options_in(const tsr_export_options& o) {
    ExportOptions out;
    const std::string_view format = o.format != nullptr ? o.format : "safetensors";
    const auto known = export_format(format);
    if (!known) {
        throw Error(
            Code::invalid_argument,
            fmt::format("format is '{}'; it must be 'safetensors', 'torch_dcp', 'torch_save' or 'npz'", format));
    }
    out.format = *known;
    out.shard_bytes = o.max_file_bytes;
    out.under = o.under != nullptr ? name_in(o.under, "under") : "";
    out.progress = progress_in(o.progress, o.progress_data);
    return out;
}

}  // namespace

extern "C" {

tsr_status tsr_saver_options_init(tsr_saver_options* options, size_t struct_size) {
    return guard([&] {
        const tsr_saver_options defaults = default_saver_options();
        write_options(options, struct_size, &defaults, sizeof defaults, "options");
    });
}

tsr_status tsr_saver_create(tsr_comm* comm, const char* root, const tsr_saver_options* options, tsr_saver** out) {
    return guard([&] {
        create(out, [&] {
            const std::shared_ptr<Communicator> ranks = comm != nullptr ? object_of(comm, "comm") : nullptr;
            auto own = std::make_shared<SaverAndFiles>();
            SaverOptions saver_options;
            std::string place;
            const auto wrong = attempt([&] {
                saver_options = saver_options_in(options);
                own->files = files_of(options_in(options, default_saver_options(), "options").storage);
                saver_options.files = own->files.get();
                place = text(root, "root");
            });
            if (wrong && ranks) ranks->refuse_split(*wrong);  // the others split a communicator for the saver
            if (wrong) throw Error(*wrong);
            own->saver = std::make_unique<Saver>(ranks, std::move(place), std::move(saver_options));
            return std::shared_ptr<Saver>(own, own->saver.get());
        });
    });
}

tsr_status tsr_saver_save(tsr_saver* saver, int64_t step, tsr_state* state) {
    return guard([&] {
        const auto s = object_of(saver, "saver");
        const auto what = object_of(state, "state");
        s->save(step, *what);
    });
}

tsr_status tsr_saver_save_async(tsr_saver* saver, int64_t step, tsr_state* state, tsr_work** work) {
    return guard([&] {
        if (work != nullptr) *work = nullptr;
        const auto s = object_of(saver, "saver");
        const auto what = object_of(state, "state");
        if (work == nullptr) {
            (void)s->save_async(step, *what);
        } else {
            create(work, [&] { return s->save_async(step, *what); });
        }
    });
}

tsr_status tsr_saver_wait(tsr_saver* saver) {
    return guard([&] {
        const auto s = object_of(saver, "saver");
        s->wait();
    });
}

tsr_status tsr_saver_resume(tsr_saver* saver, tsr_state* state, int64_t* step) {
    return guard([&] {
        required(step, "step") = 0;
        const auto s = object_of(saver, "saver");
        const auto into = object_of(state, "state");
        *step = s->resume(*into);
    });
}

tsr_status tsr_saver_should_stop(tsr_saver* saver, int64_t step, int32_t told, int32_t* stop) {
    return guard([&] {
        required(stop, "stop") = 0;
        const auto s = object_of(saver, "saver");
        const bool asked = flag(told, "told");
        const bool preempted = preempt_requested();  // also tells the launcher that this rank polls
        *stop = s->should_stop(step, asked || preempted) ? 1 : 0;
    });
}

tsr_status tsr_saver_trim(tsr_saver* saver) {
    return guard([&] { object_of(saver, "saver")->trim(); });
}

void tsr_saver_destroy(tsr_saver* saver) {
    if (saver != nullptr && saver->magic == tsr_saver::type_magic) saver->object->keep_while_running(saver->object);
    destroy(saver);
}

tsr_status tsr_load_options_init(tsr_load_options* options, size_t struct_size) {
    return options_init(options, struct_size, default_load_options, "options");
}

tsr_status tsr_checkpoint_open(const char* path, tsr_checkpoint** out) {
    return guard([&] { create(out, [&] { return Checkpoint::open(absolute(text(path, "path"))); }); });
}

tsr_status tsr_open_options_init(tsr_open_options* options, size_t struct_size) {
    return options_init(options, struct_size, default_open_options, "options");
}

tsr_status tsr_checkpoint_open_with(const char* path, const tsr_open_options* options, tsr_checkpoint** out) {
    return guard([&] {
        create(out, [&] {
            auto own = std::make_shared<CheckpointAndFiles>();
            own->files = files_of(options_in(options, default_open_options, "options").storage);
            own->checkpoint = own->files ? Checkpoint::open(text(path, "path"), *own->files)
                                         : Checkpoint::open(absolute(text(path, "path")));
            return std::shared_ptr<const Checkpoint>(own, own->checkpoint.get());
        });
    });
}

tsr_status tsr_checkpoint_path(const tsr_checkpoint* checkpoint, char* out, size_t capacity, size_t* size) {
    return guard([&] { text_out(object_of(checkpoint, "checkpoint")->path(), out, capacity, size); });
}

tsr_status tsr_checkpoint_manifest(const tsr_checkpoint* checkpoint, char* out, size_t capacity, size_t* size) {
    return guard([&] { text_out(object_of(checkpoint, "checkpoint")->manifest_text(), out, capacity, size); });
}

tsr_status tsr_checkpoint_step(const tsr_checkpoint* checkpoint, int64_t* step) {
    return guard([&] { required(step, "step") = object_of(checkpoint, "checkpoint")->manifest().step; });
}

tsr_status tsr_checkpoint_tensor_count(const tsr_checkpoint* checkpoint, size_t* count) {
    return guard([&] { required(count, "count") = object_of(checkpoint, "checkpoint")->names().size(); });
}

tsr_status tsr_checkpoint_tensor(const tsr_checkpoint* checkpoint, size_t index, const char** name, tsr_dtype* dtype,
                                 const int64_t** shape, int32_t* ndim) {
    return guard([&] {
        const auto& c = object_of(checkpoint, "checkpoint");
        if (index >= c->names().size()) {
            throw Error(Code::invalid_argument,
                        fmt::format("tensor {} does not exist; the checkpoint has {} tensors, counted from 0", index,
                                    c->names().size()));
        }
        const std::string& found = c->names()[index];
        const SavedTensor& tensor = *c->manifest().find(found);
        required(name, "name") = found.c_str();
        required(dtype, "dtype") = static_cast<tsr_dtype>(tensor.dtype);
        required(shape, "shape") = tensor.shape.data();
        required(ndim, "ndim") = tensor.shape.ndim();
    });
}

tsr_status tsr_checkpoint_read(const tsr_checkpoint* checkpoint, const char* name, const tsr_tensor* tensor) {
    return guard([&] {
        const auto c = object_of(checkpoint, "checkpoint");
        c->read(name_in(name, "name"), tensor_in(tensor, "tensor"));
    });
}

tsr_status tsr_checkpoint_load(const tsr_checkpoint* checkpoint, tsr_state* state, const tsr_load_options* options) {
    return guard([&] {
        const auto c = object_of(checkpoint, "checkpoint");
        const auto into = object_of(state, "state");
        const tsr_load_options o = options_in(options, default_load_options, "options");
        const LoadReport report = c->load(*into, load_options_in(o));
        if (o.report != nullptr) o.report(report.json().dump().c_str(), o.report_data);
    });
}

tsr_status tsr_checkpoint_verify(const tsr_checkpoint* checkpoint, int32_t full) {
    return tsr_checkpoint_verify_progress(checkpoint, full, nullptr, nullptr);
}

tsr_status tsr_checkpoint_verify_progress(const tsr_checkpoint* checkpoint, int32_t full, tsr_progress_fn progress,
                                          void* user_data) {
    return guard([&] {
        const auto depth = flag(full, "full") ? Checkpoint::Depth::everything : Checkpoint::Depth::headers;
        const auto c = object_of(checkpoint, "checkpoint");
        c->check(depth, progress_in(progress, user_data));
    });
}

tsr_status tsr_export_options_init(tsr_export_options* options, size_t struct_size) {
    return guard([&] {
        const tsr_export_options defaults = default_export_options();
        write_options(options, struct_size, &defaults, sizeof defaults, "options");
    });
}

tsr_status tsr_checkpoint_export(const tsr_checkpoint* checkpoint, tsr_comm* comm, const char* directory,
                                 const tsr_export_options* options) {
    return guard([&] {
        const auto source = object_of(checkpoint, "checkpoint");
        const auto o = options_in(options, default_export_options(), "options");
        if (o.timeout_ms <= 0) {
            throw Error(Code::invalid_argument, fmt::format("the timeout is {} ms; it must be positive", o.timeout_ms));
        }
        const ExportOptions how = export_options_in(o);
        const std::string place(text(directory, "directory"));
        Peers peers(comm == nullptr ? nullptr : split_for_export(*object_of(comm, "comm"), milliseconds{o.timeout_ms}));
        const Exported exported = export_checkpoint(*source, peers, place, how);
        if (exported.unreadable.empty() || peers.rank() != 0) return;
        const auto& [name, why] = *exported.unreadable.begin();
        log::warning("the export of {} to {} leaves out what cannot be read ({} in all): '{}' ({}){}", source->path(),
                     place, exported.unreadable.size(), name, why, exported.unreadable.size() > 1 ? " and others" : "");
    });
}

void tsr_checkpoint_destroy(tsr_checkpoint* checkpoint) { destroy(checkpoint); }

}  // extern "C"

}  // namespace tsr::capi
