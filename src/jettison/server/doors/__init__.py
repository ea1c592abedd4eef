"""Two more doors to the generation of chats: OpenAI's ``/v1/responses`` and Anthropic's ``/v1/messages``."""
