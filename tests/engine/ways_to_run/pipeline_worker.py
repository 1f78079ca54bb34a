# SPDX-License-Identifier: Apache-2.0
"""The checking worker for pipeline parallelism on a CPU in eager mode, which vLLM 0.32 needs one repair for."""

from checking_worker import OmniCheckingCpuWorker
from vllm.sequence import IntermediateTensors
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class PipelineRunner(CPUModelRunner):
    """Makes the buffer for what the previous rank sends: the dummy run makes it, which CPUs skip in eager mode."""

    def execute_model(self, scheduler_output, intermediate_tensors=None):
        if intermediate_tensors is not None and self.intermediate_tensors is None:
            buffers = {
                name: rows.new_empty((self.max_num_tokens, *rows.shape[1:]))
                for name, rows in intermediate_tensors.items()
            }
            self.intermediate_tensors = IntermediateTensors(buffers)
        return super().execute_model(scheduler_output, intermediate_tensors)


class OmniCheckingPipelineCpuWorker(OmniCheckingCpuWorker):
    def init_device(self):
        super().init_device()
        self.model_runner.__class__ = PipelineRunner
