// The files in which a failing rank reports its error to the agent: torchelastic's JSON, so that PyTorch's @record and
// Tessera's bindings write the same and either launcher understands it. Facts that Tessera knows about the error are
// stored as values: code, rank in the communicator and in the job, peer in the job, pid, operation, sequence number.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.hpp"

namespace tsr {

struct RecordedError {
    std::string message;
    std::string traceback;
    double timestamp = 0;   // seconds since 1970
    std::string code = {};  // code_name() of a Tessera error; empty: another error, or unknown
    int peer = -1;          // the job's rank that the error is about; -1: unknown
    int rank = -1;          // the rank of the communicator on which the error occurred; -1: unknown
    int job_rank = -1;      // its number in the job; -1: unknown
};

// Writes the file that TESSERA_ERROR_FILE or TORCHELASTIC_ERROR_FILE names, if any. The first call of the process
// counts. `facts` are of the error that the message tells of; nullptr: not known. Throws IO.
void record_error(std::string_view message, std::string_view traceback, const ErrorRecord* facts = nullptr);

// Writes the first failure of a communicator of this process to the file that TESSERA_FAILURE_FILE names, in the same
// form: a trainer that ends without a call of record_error() is known by it. nullptr: another communicator works, so
// that the failure is over; the file is removed.
void record_failure(const ErrorRecord* failure) noexcept;

// nullopt if the file does not exist or is not such JSON: a dying rank may have written only part of it.
[[nodiscard]] std::optional<RecordedError> read_error_file(const std::string& path);

}  // namespace tsr
