#include "checkpoint/export/export.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "base/attempt.hpp"
#include "base/clock.hpp"
#include "base/error.hpp"
#include "checkpoint/export/draft.hpp"
#include "checkpoint/export/export_writer.hpp"
#include "checkpoint/formats/safetensors/header.hpp"
#include "checkpoint/formats/torch_dcp/writer.hpp"

namespace tsr {

void for_each_own_batch(std::span<const TypedBox> boxes, const Share& share, int64_t& batch,
                        const std::function<void(std::span<const BatchPart> parts, int64_t bytes)>& visit) {
    for_each_batch(boxes, share.batch_bytes, [&](std::span<const BatchPart> parts, int64_t bytes) {
        if (batch++ % share.world_size != share.rank) return;
        poll_interrupt();
        visit(parts, bytes);
        if (share.progress) share.progress(bytes);
    });
}

void read_batch(const Checkpoint& source, std::span<const ExportEntry> entries, std::span<const BatchPart> batch,
                std::byte* memory) {
    std::vector<ReadPart> reads;
    reads.reserve(batch.size());
    for (const BatchPart& part : batch) reads.push_back({entries[part.index].source, part.box, memory + part.begin});
    source.read(reads);
}

namespace {

constexpr std::string_view format_names[] = {"safetensors", "torch_dcp", "torch_save", "npz"};  // as ExportFormat

ExportSelection select(const Checkpoint& source, const ExportOptions& options, Exported& exported) {
    const Manifest& manifest = source.manifest();
    const bool is_safetensors = options.format == ExportFormat::safetensors;
    const bool is_npz = options.format == ExportFormat::npz;
    if (!is_safetensors && options.shard_bytes != 0) {
        throw Error(Code::invalid_argument,
                    options.format == ExportFormat::torch_dcp
                        ? "a file size limit is not supported for torch_dcp: each rank writes one file"
                        : fmt::format("a file size limit is not supported for {}: it writes a single file",
                                      name_of(options.format)));
    }
    if (options.shard_bytes < 0) {
        throw Error(Code::invalid_argument,
                    fmt::format("the file size limit is {}; it must be 0 (one file) or more", options.shard_bytes));
    }
    const auto renamed = [&](const std::string& name) {
        if (!name.starts_with(options.under)) return std::string();
        std::string rest = name.substr(options.under.size());
        if (!options.under.empty() && options.under.back() != '.' && rest.starts_with('.')) {
            throw Error(Code::invalid_argument,
                        fmt::format("'{}' without the prefix '{}' is '{}'; did you mean the prefix \"{}.\"?", name,
                                    options.under, rest, options.under));
        }
        return rest;
    };
    ExportSelection selection;
    std::map<std::string, std::string> written;  // a saved name -> the name under which it is written
    for (const std::string& name : source.names()) {
        const std::string to = renamed(name);
        if (to.empty()) continue;
        const auto [first, is_new] = written.emplace(manifest.saved_name(name), to);
        if (!is_new && !is_npz) {
            selection.tied.emplace(to, first->second);
            continue;
        }
        const SavedTensor& tensor = *manifest.find(name);
        if (is_npz) check_npz_entry(to, tensor.dtype);
        if (is_safetensors) check_safetensors_key(to);
        if (is_safetensors && !is_in_safetensors(tensor.dtype)) {
            throw Error(Code::unsupported, fmt::format("tensor '{}' is {}, which safetensors does not support", name,
                                                       name_of(tensor.dtype)));
        }
        selection.entries.push_back({name, to, {Box::whole(tensor.shape), tensor.dtype}});
        exported.size_bytes += tensor.size_bytes();
    }
    if (selection.entries.empty()) {
        throw Error(
            Code::invalid_argument,
            options.under.empty()
                ? fmt::format("{} holds no tensors", source.path())
                : fmt::format("no tensor of {} has a name that begins with '{}'; run `tessera ckpt tree` to list all",
                              source.path(), options.under));
    }
    for (const auto& [name, value] : manifest.values) {
        if (is_torch_record(name, value)) continue;
        const std::string to = renamed(name);
        if (is_safetensors || is_npz || to.empty()) {
            exported.left_out.push_back(name);
        } else {
            selection.values.emplace(to, value);
        }
    }
    if (options.format == ExportFormat::torch_dcp) {
        selection.values = flattened(
            selection.values, [&](const std::string& name) { return manifest.find(options.under + name) != nullptr; });
    }
    for (const auto& [name, why] : manifest.unreadable) {
        if (!renamed(name).empty()) exported.unreadable.emplace(name, why);
    }
    exported.tensor_count = static_cast<int64_t>(selection.entries.size());
    return selection;
}

Digest digest_of_export(const Checkpoint& source, const ExportSelection& selection, const std::string& directory,
                        const ExportOptions& options) {
    std::string text = fmt::format("{}\n{}\n{} {}\n", source.identity(), directory, static_cast<int>(options.format),
                                   options.shard_bytes);
    for (const ExportEntry& entry : selection.entries) {
        text += fmt::format("{}\n{} {} {}\n", entry.name, entry.source, name_of(entry.box.dtype),
                            entry.box.box.sizes.str());
    }
    for (const auto& [name, target] : selection.tied) text += fmt::format("{}\n{}\n", name, target);
    for (const auto& [name, value] : selection.values) text += fmt::format("{}\n{}\n", name, value.dump());
    return digest_of(text);
}

std::unique_ptr<ExportWriter> writer_of(const Checkpoint& source, const ExportSelection& selection,
                                        const std::string& directory, const ExportOptions& options, FileSystem& files) {
    switch (options.format) {
        case ExportFormat::safetensors:
            return safetensors_export(source, selection, directory, options.shard_bytes, files);
        case ExportFormat::torch_dcp: return torch_dcp_export(source, selection, directory, files);
        case ExportFormat::torch_save: return torch_save_export(source, selection, directory, files);
        case ExportFormat::npz: return npz_export(source, selection, directory, files);
    }
    throw Error(Code::internal, "unknown export format");
}

}  // namespace

std::string_view name_of(ExportFormat format) { return format_names[static_cast<size_t>(format)]; }

std::optional<ExportFormat> export_format(std::string_view name) {
    const auto* const found = std::find(std::begin(format_names), std::end(format_names), name);
    if (found == std::end(format_names)) return std::nullopt;
    return static_cast<ExportFormat>(found - std::begin(format_names));
}

std::shared_ptr<Communicator> split_for_export(Communicator& comm, milliseconds timeout) {
    if (comm.world_size() == 1) return nullptr;
    CommOptions own = comm.options();
    own.timeout = timeout;
    own.name = fmt::format("{}.export", comm.name());
    return comm.split(0, comm.rank(), own);
}

Exported export_checkpoint(const Checkpoint& source, Peers& peers, const std::string& directory,
                           const ExportOptions& options, FileSystem& files) {
    struct Ballot {
        Digest digest;
        std::array<char, 8> tag;
    };
    Exported exported;
    ExportSelection selection;
    std::unique_ptr<Draft> draft;
    Ballot record{};
    const auto vote = [&](const std::optional<Error>& error) {
        if (const auto agreed = peers.vote(error)) throw Error(agreed->with_operation("export"));
    };
    const auto prepared = attempt([&] {
        selection = select(source, options, exported);
        record.digest = digest_of_export(source, selection, directory, options);
        if (peers.rank() != 0) return;
        draft = std::make_unique<Draft>(files, directory);
        std::copy_n(draft->tag().begin(), record.tag.size(), record.tag.begin());
    });
    std::vector<Ballot> records;
    if (const auto agreed = peers.vote(prepared, record, records)) throw Error(agreed->with_operation("export"));
    for (size_t rank = 1; rank < records.size(); ++rank) {
        if (records[rank].digest == records[0].digest) continue;
        throw Error(
            Code::mismatch,
            fmt::format("rank {}'s export differs from rank 0's in its checkpoint, tensors, values, directory or "
                        "options",
                        rank))
            .with_operation("export");
    }

    const std::string path = Draft::path_of(directory, std::string_view(records[0].tag.data(), records[0].tag.size()));
    std::optional<HeldDirectory> held;
    std::unique_ptr<ExportWriter> writer;
    vote(attempt([&] {
        held.emplace(files, parent_of(path), path);
        writer = writer_of(source, selection, path, options, held->files());
        if (peers.rank() == 0) writer->begin();
    }));
    std::string report;
    const auto written = attempt([&] {
        // About an even share, as batches have one size.
        Progress progress(options.progress, Phase::write, exported.size_bytes / peers.world_size());
        report = writer->write({peers.rank(), peers.world_size(), options.batch_bytes, [&](int64_t bytes) {
                                    progress.add(bytes);
                                    progress.poll();
                                }});
        progress.finish();
    });
    vote(written);
    const std::vector<std::string> reports = peers.gather(report);
    std::string names;
    const auto finished = attempt([&] {
        if (peers.rank() != 0) return;
        for (const std::string& name : writer->finish(reports)) names += name + "\n";
        draft->move_to_its_place();
    });
    vote(finished);
    names = peers.from_rank0(names);
    for (size_t begin = 0; begin < names.size();) {
        const size_t end = names.find('\n', begin);
        exported.files.push_back(names.substr(begin, end - begin));
        begin = end + 1;
    }
    return exported;
}

}  // namespace tsr
